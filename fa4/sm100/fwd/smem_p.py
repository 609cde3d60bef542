"""Softmax step of a Q tile whose P is in shared memory, in e4m3. Softmax itself rescales O if a row max has grown.

A share of the words of P comes from `core.line.Line`, in float16, the others from the special-function unit.

Waits:   mma_softmax_S.full, softmax_mma_P.free
Signals: mma_softmax_S.free, softmax_mma_P.full
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.line import Line, in_sum, is_in_share
from ...core.vec_io import Packed, add_f16x2, floats_of_f16x2, pack_f16x2_as_e4m3
from ...pipeline.cursor import Cursor, Lane, produce
from ...pipeline.ends import Ends
from ...pipeline.row_chunks import store_row
from .. import tmem
from .config import Sm100ForwardConfig
from .context import Sm100ForwardContext
from .correction import rescale_if_any
from .row_softmax import RowInBlock, finite_offset, load_scores, offset_and_factor, packed_sum, row_maximum

WORD = 4  # keys whose P fills a word


def smem_p_step(
    context: Sm100ForwardContext,
    ends: Ends,
    tile: Int32,
    cursor: Cursor,
    state: tuple[Float32, Float32, Float32, Float32],
    block: RowInBlock,
    is_masked: bool,
):
    """Process one key block: S -> P. state: as of `softmax.softmax_step`; without dropout its last element is the
    largest score whose P is on the line."""
    cfg = context.cfg
    row_max_scaled, total, row_max, last = state
    row = cute.arch.thread_idx()[0] % cfg.tile_m
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    p_cursor = cursor.at_iteration_of(produce(ends.softmax_mma_P, Lane(tile, cfg.q_tiles)))

    cursor.wait()
    s = load_scores(tmem.lane_address(context.tmem.S, warp) + tile * cfg.tile_n, cfg.tile_n)
    tmem.wait_loads()
    cursor.arrive()
    s = block.visible_scores(cfg, s, is_masked)

    on_line = [is_on_line(cfg, word) for word in range(cfg.tile_n // WORD)]
    maxima = {
        is_line: row_maximum([x for i, x in enumerate(s) if on_line[i // WORD] == is_line])
        for is_line in dict.fromkeys(on_line)
    }
    block_max = cute.arch.fmax(*maxima.values()) if len(maxima) == 2 else maxima[on_line[0]]
    before = row_max_scaled
    row_max_scaled, factor = offset_and_factor(cfg, row_max_scaled, block_max * block.scales.log2)
    minus_offset = -finite_offset(cfg, row_max_scaled, is_masked)
    words, block_sum, kept_sum = weights(cfg, block, s, on_line, minus_offset)
    p_cursor.wait()  # O has the product with the P before
    # Without a visible key before this block, O is 0, or not written yet.
    rescale_if_any(context, tile, factor, (factor < 1.0) & (before != -Float32.inf), cfg.head_dim_v_padded)
    store_row(context.smem.address("P") + tile * cfg.p_tile.nbytes, cfg.p_tile, row, 0, words)
    p_cursor.arrive()
    if cfg.drops_8bit_p:
        last, block_max = last * factor + kept_sum, block.largest_kept(s)
    elif True in maxima:
        last = cute.arch.fmax(last, maxima[True])
    return row_max_scaled, total * factor + block_sum, cute.arch.fmax(row_max, block_max), last


def is_on_line(cfg: Sm100ForwardConfig, word: int) -> bool:
    """True if this word of a row of P comes from the line. Dropout would have to mask float16 numbers."""
    return not cfg.has_dropout and is_in_share(word, cfg.polynomial)


def weights(
    cfg: Sm100ForwardConfig, block: RowInBlock, s: list[Float32], on_line: list[bool], minus_offset: Float32
) -> tuple[list[Int32], Float32, Float32 | None]:
    """Return P of a row, packed into words, its sum before rounding, and with dropout the sum of what is kept. The sums
    grow with the words: at the end, they would wait for their own results."""
    line = Line(block.scales.log2, minus_offset)
    words, halves = list[Int32](), list[Int32]()
    floats, of_kept = list[tuple[Float32, Float32]](), list[tuple[Float32, ...]]()
    for word in range(len(on_line)):
        if on_line[word]:
            pairs = [line.pair(*s[WORD * word + i : WORD * word + i + 2]) for i in (0, 2)]
            words.append(pack_f16x2_as_e4m3(*pairs))
            halves = [add_f16x2(*pair) for pair in zip(halves, pairs)] if halves else pairs
        else:
            packed, pairs, kept_pairs = Packed(cfg.v_dtype), [], []
            for pair in (2 * word, 2 * word + 1):
                p, kept = block.weights(s, pair, minus_offset, 0)
                packed.add(*kept)
                pairs.append(p)
                kept_pairs.append(kept)
            words += packed.words
            floats = added(floats, pairs)
            if cfg.drops_8bit_p:
                of_kept = added(of_kept, kept_pairs)
    floats += [floats_of_f16x2(half) for half in halves]
    low, high = packed_sum(floats)
    if not cfg.drops_8bit_p:
        return words, low + high, None
    low_kept, high_kept = packed_sum(of_kept)
    return words, low + high, low_kept + high_kept


def added(sums: list, pairs: list) -> list:
    """Sums of two numbers each, plus a pair of each."""
    return [cute.arch.add_packed_f32x2(*both) for both in zip(sums, pairs)] if sums else pairs


def counted_p(cfg: Sm100ForwardConfig, state: tuple[Any, ...], scale: Float32, p_max: Float32) -> Float32 | None:
    """Return what the row sum has instead of the largest P of a row, `p_max`; None if no P is on the line."""
    if not any(is_on_line(cfg, word) for word in range(cfg.tile_n // WORD)):
        return None
    row_max_scaled, _, row_max, line_max = state
    return in_sum(Line(scale, -row_max_scaled), line_max, row_max, p_max)
