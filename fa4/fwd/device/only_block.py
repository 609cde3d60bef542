"""Softmax of a consumer that has one key block (`ForwardVariant.one_block`).

The block begins with the first key within the window of the consumer's first query. So in a window of tile_n - qc + 1
keys or more, qc queries of a consumer differ only in the first and in the last qc keys of the block. The keys between
them need a mask only where the sequence begins or ends.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...core.mask_bits import apply_mask
from ...core.score import apply_softcap
from ...core.vec_io import pack_half
from ...pipeline.cursor import Cursor
from ...pipeline.fragment import ROWS_PER_THREAD, columns_below, row_registers
from ..consumers import ROWS
from .consumer import Consumer
from .rows import query_of
from .softmax import CHAINS, Softmax, reduce_in_chains
from .work import Work

KEYS_PER_PAIR = 8  # keys of which a thread has two scores of each row


def only_block(consumer: Consumer, softmax: Softmax, work: Work, q: Cursor, k: Cursor) -> Cursor:
    """Compute P of the only key block of a work tile."""
    s = consumer.accumulator(False)
    k.wait()
    consumer.start_s(s, q, k, False)
    query = query_of(consumer.cfg, consumer.row_tile(work) * ROWS)
    first_key = work.mask.first_of_window(query)
    consumer.wait(0)
    k.arrive()
    if consumer.cfg.has_softcap:
        apply_softcap(s, softmax.scales.over_cap)
    mask_scores(consumer, softmax, s, first_key, work.mask.stop_key(query))
    rows = [[s[i] for i in row_registers(2 * cute.size(s), r)] for r in range(ROWS_PER_THREAD)]
    softmax.raise_maxima([reduce_in_chains(x, cute.arch.fmax) for x in rows])
    packed_exponentials(softmax, rows, consumer.p)
    return k.next()


def mask_scores(consumer: Consumer, softmax: Softmax, s: cute.Tensor, first_key: Int32, stop_key: Int32) -> None:
    """Set masked scores to -inf. first_key, stop_key: of the window of the consumer's first query; the block begins
    with `first_key`, which is negative if the window begins before the keys."""
    cfg, between = consumer.cfg, consumer.cfg.keys_between_consumers
    bounds = [
        (columns_below(softmax.first[r] - first_key), columns_below(softmax.stop[r] - first_key))
        for r in range(ROWS_PER_THREAD)
    ]
    for r, (first, stop) in enumerate(bounds):
        registers = row_registers(cfg.tile_n, r)
        for i in range(2 * between // KEYS_PER_PAIR):
            last = len(registers) - 1 - i
            s[registers[i]] = keep(first <= i, s[registers[i]])
            s[registers[last]] = keep(stop > last, s[registers[last]])
    needs_mask = (first_key < 0) | (stop_key - first_key < cfg.tile_n - between)
    mask_all(cfg.tile_n, s, bounds, Boolean(needs_mask))


@cute.jit
def mask_all(tile_n: cutlass.Constexpr[int], s: cute.Tensor, bounds: list, needs_mask: Boolean):
    """If `needs_mask`, set all scores of a row to -inf but those of its bounds."""
    if needs_mask:
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            first, stop = bounds[r]
            registers = row_registers(tile_n, r)
            for i, x in zip(registers, apply_mask([s[i] for i in registers], first, stop)):
                s[i] = x


def keep(is_visible: Boolean, x: Float32) -> Float32:
    return Float32(cutlass.select_(is_visible, x, -Float32.inf))


def packed_exponentials(softmax: Softmax, rows: list[list[Float32]], p: cute.Tensor) -> None:
    """Write P of masked scores, rounded, to the operand of the next product, and add it to the total. To round each P
    at once takes fewer registers than to round all of them at last."""
    packed = cute.recast_tensor(p, Int32)
    references = [softmax.row_max_scaled[r] for r in range(ROWS_PER_THREAD)]
    references = [Float32(cutlass.select_(x == -Float32.inf, Float32(0.0), x)) for x in references]
    sums: list[list[Float32]] = [[] for _ in range(ROWS_PER_THREAD)]
    for i in range(cute.size(packed)):
        pair, r = divmod(i, ROWS_PER_THREAD)
        scores = rows[r][2 * pair : 2 * pair + 2]
        if not scores:  # of whole steps of the product, the last may have more keys than the block
            packed[i] = Int32(0)
            continue
        a, b = (cute.math.exp2(x * softmax.log2_scale(r) - references[r], fastmath=True) for x in scores)
        if pair < CHAINS:
            sums[r].append(a + b)
        else:
            sums[r][pair % CHAINS] = sums[r][pair % CHAINS] + (a + b)
        packed[i] = settled(pack_half(a, b, p.element_type))
    for r in range(ROWS_PER_THREAD):
        softmax.total[r] = softmax.total[r] + reduce_in_chains(sums[r], lambda a, b: a + b)


def settled(x: Int32) -> Int32:
    """Keep the compiler from computing x later than here."""
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])
