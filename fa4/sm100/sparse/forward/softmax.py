"""Softmax role, one warpgroup: stores Q to tensor memory, turns S into P, rescales O, and stores O and the log-sum-exp.

A warp has 16 heads; four threads share two of them, with a quarter of the keys of a block each. Rows of O^T are columns
of O, so all warps rescale all heads, by factors that they exchange through shared memory.

Waits:   mma_softmax_S.full, softmax_mma_P.free
Signals: softmax_mma_{Q,P}.full, mma_softmax_S.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ....bwd.device.list_work import SparseWork, work_tile
from ....core.softmax import LOG2_E
from ....core.vec_io import bits, load_floats, load_vec, pack_half, rounded, store_vec
from ....pipeline.cursor import Cursor, consume, produce
from ....pipeline.roles import WARP
from ....pipeline.smem import PANEL_ROW_BYTES
from ... import tmem
from ...exp2 import exp2_mufu
from ...stages import PANEL_COLUMNS
from .config import HEADS, KEYS, O_ROWS, RESCALE_THRESHOLD, WORD_COLUMNS
from .context import ListsForwardContext

_THREADS = 4 * WARP
_ROWS = 2  # of a thread
_WARP_ROWS = 16
_BUFFERS = 2
_LN_2 = 1 / LOG2_E
# Factors of O of all heads, and then whether a warp has others than 1, for two blocks; and the final ones.
_BUFFER = HEADS + 4
FACTORS_BYTES = 4 * (_BUFFERS + 1) * _BUFFER
_COLUMNS = 32  # of O^T that a thread has at a time


@cute.jit
def softmax(context: ListsForwardContext):
    ends, work = context.ends("softmax"), work_tile(context)
    p = produce(ends.softmax_mma_P)
    offsets, totals, maxima = ([Float32(x)] * _ROWS for x in (-Float32.inf, 0.0, -Float32.inf))
    o0, o1, t0, t1, m0, m1 = *offsets, *totals, *maxima
    if work.count > 0:
        store_q(context, work)
        produce(ends.softmax_mma_Q).arrive()
        scores, blocks = consume(ends.mma_softmax_S), work.blocks(context)
        for i in cutlass.range(blocks - 1, unroll=1):
            o0, o1, t0, t1, m0, m1, p = step(context, scores, p, i, work.count, (o0, o1, t0, t1, m0, m1), False)
            scores = scores.next()
        o0, o1, t0, t1, m0, m1, p = step(context, scores, p, blocks - 1, work.count, (o0, o1, t0, t1, m0, m1), True)
    store_results(context, work, p, (o0, o1), (t0, t1), (m0, m1))


def _warp() -> Int32:
    return cute.arch.make_warp_uniform(cute.arch.warp_idx())


def own_row(i: int) -> Int32:
    """Index of this thread's i-th head."""
    return _warp() * _WARP_ROWS + i * tmem.QUAD_ROWS + cute.arch.lane_idx() // 4


def of_quad(x: Float32, combine) -> Float32:
    """Combine the values of the four threads that share rows."""
    for distance in (1, 2):
        x = combine(x, cute.arch.shuffle_sync_bfly(x, offset=distance))
    return x


def store_q(context: ListsForwardContext, work: SparseWork) -> None:
    """Store panels of Q to tensor memory, where 64 rows of a left operand are in 16 lanes of each warp."""
    cfg, q = context.cfg, work.matrix(context.args.tensors.q)
    row = cutlass.min(work.first + _warp() * _WARP_ROWS + cute.arch.lane_idx() % _WARP_ROWS, cfg.group - 1)
    for panel in range(cfg.q_panels_in_tmem):
        start = q.iterator + cute.crd2idx((row, panel * PANEL_COLUMNS), q.layout)
        words = []
        for i in range(0, PANEL_COLUMNS, 8):
            words += load_vec(start + i, 4)
        tmem.store(tmem.lane_address(context.tmem.Q, _warp()) + panel * WORD_COLUMNS, words)
    tmem.wait_stores()


def step(
    context: ListsForwardContext, scores: Cursor, p: Cursor, block: Int32, count: Int32, state: tuple, ends_here: bool
) -> tuple:
    """Process one block: S -> P. state: of each row, the offset of exponents, the sum of this thread's P, and the
    scaled maximum. ends_here: the list ends in this block. Returns the new state and the position of P."""
    scale = context.args.scale_log2
    offsets, totals, maxima = (list(state[i : i + _ROWS]) for i in range(0, len(state), _ROWS))
    scores.wait()
    s = tmem.load_quad_rows(tmem.lane_address(context.tmem.S, _warp()), KEYS)
    tmem.wait_loads()
    scores.arrive()
    first = block * KEYS + cute.arch.lane_idx() % 4 * 2
    factors, must_rescale, packed = [], Boolean(False), []
    for row in range(_ROWS):
        values = [x for pair in s[row] for x in pair]
        kept = [first + (i // 2 * 8 + i % 2) < count for i in range(len(values))] if ends_here else []
        listed = [Float32(cutlass.select_(keep, x, -Float32.inf)) for keep, x in zip(kept, values)] or values
        largest = listed[0]
        for x in listed[1:]:
            largest = cute.arch.fmax(largest, x)
        largest = of_quad(largest, cute.arch.fmax) * scale
        log2_factor = offsets[row] - largest
        moves = Boolean(log2_factor < -RESCALE_THRESHOLD)  # False without a finite score: -inf - -inf is NaN
        must_rescale = must_rescale | (moves & (offsets[row] != -Float32.inf))
        factor = Float32(cutlass.select_(moves, exp2_mufu(log2_factor), Float32(1.0)))
        offsets[row] = Float32(cutlass.select_(moves, largest, offsets[row]))
        maxima[row] = cute.arch.fmax(maxima[row], largest)
        minus = -Float32(cutlass.select_(offsets[row] == -Float32.inf, Float32(0.0), offsets[row]))
        total, words = Float32(0.0), []
        for i in range(0, len(values), 2):
            x = cute.arch.fma_packed_f32x2((values[i], values[i + 1]), (scale, scale), (minus, minus))
            if ends_here:  # not before: scale may be 0
                x = [Float32(cutlass.select_(kept[i + j], x[j], -Float32.inf)) for j in range(2)]
            pair = exp2_mufu(x[0]), exp2_mufu(x[1])
            total = total + (pair[0] + pair[1])
            words.append(pack_half(*pair, context.cfg.dtype))
        totals[row] = totals[row] * factor + total
        factors.append(factor)
        packed.append(words)
    store_factors(context, block % _BUFFERS, factors, must_rescale)
    p.wait()  # O has the product with the P before
    cute.arch.barrier(barrier_id=context.factors_stored, number_of_threads=_THREADS)
    rescale(context, block % _BUFFERS)
    for row in range(_ROWS):
        store_p(context, own_row(row), packed[row])
    p.arrive()
    return *offsets, *totals, *maxima, p.next()


def buffer_of(context: ListsForwardContext, index: Int32 | int) -> cute.Pointer:
    return context.smem.pointer("factors", Float32) + index * _BUFFER


@cute.jit
def store_factors(context: ListsForwardContext, index: Int32, factors: list[Float32], must_rescale: Boolean):
    """Store factors of this thread's heads, and whether the warp has any but 1."""
    buffer = cute.make_tensor(buffer_of(context, index), cute.make_layout(_BUFFER))
    any_rescales = cute.arch.vote_any_sync(must_rescale)
    if cute.arch.lane_idx() % 4 == 0:
        for i in cutlass.range_constexpr(_ROWS):
            buffer[own_row(i)] = factors[i]
    if cute.arch.lane_idx() == 0:
        buffer[HEADS + _warp()] = Float32(cutlass.select_(any_rescales, Float32(1.0), Float32(0.0)))


@cute.jit
def rescale(context: ListsForwardContext, index: Int32):
    """Multiply O by the factors of its heads, if any is not 1."""
    buffer = buffer_of(context, index)
    votes = load_floats(buffer + HEADS, 4)
    if votes[0] + votes[1] + votes[2] + votes[3] > 0.0:
        for column in cutlass.range(0, context.cfg.o_tiles * HEADS, _COLUMNS, unroll=1):
            address = tmem.lane_address(context.tmem.O, _warp()) + column
            o = tmem.load(address, _COLUMNS)
            factors = factors_of(buffer, column % HEADS)
            tmem.wait_loads()
            tmem.store(address, [bits(x * factor) for x, factor in zip(o, factors)])
        tmem.wait_stores()


def factors_of(buffer: cute.Pointer, first: Int32 | int) -> list[Float32]:
    """Factors of `_COLUMNS` heads."""
    found = []
    for i in range(0, _COLUMNS, 4):
        found += load_floats(buffer + first + i, 4)
    return found


def store_p(context: ListsForwardContext, row: Int32, words: list[Int32]) -> None:
    """Store pairs of P: the i-th one has the columns 8 i + 2 (lane % 4) and the next of a row."""
    start = context.smem.address("P") + row * PANEL_ROW_BYTES + cute.arch.lane_idx() % 4 * 4
    for i, word in enumerate(words):
        address = start + (i ^ row % 8) * 16
        store_vec(cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4), [word])


@cute.jit
def store_results(
    context: ListsForwardContext, work: SparseWork, p: Cursor, offsets: tuple, totals: tuple, maxima: tuple
):
    """Store the log-sum-exp and normalised O of heads that exist; -inf and zeros if the list is empty."""
    cfg, tensors = context.cfg, context.args.tensors
    buffer = cute.make_tensor(buffer_of(context, _BUFFERS), cute.make_layout(_BUFFER))
    for i in cutlass.range_constexpr(_ROWS):
        total = of_quad(totals[i], lambda x, y: x + y)
        largest_p = exp2_mufu(maxima[i] - offsets[i])
        correction = rounded(largest_p, cfg.dtype) - largest_p if total != 0.0 else Float32(0.0)
        norm = cute.arch.rcp_approx(total + correction) if total != 0.0 else Float32(0.0)
        lse = offsets[i] * _LN_2 + cute.math.log(total) if total != 0.0 else -Float32.inf
        head = work.first + own_row(i)
        if cute.arch.lane_idx() % 4 == 0:
            buffer[own_row(i)] = norm
            if head < cfg.group:
                tensors.lse[work.token, work.part * cfg.group + head] = lse
    cute.arch.barrier(barrier_id=context.factors_stored, number_of_threads=_THREADS)
    if work.count > 0:
        p.wait()  # the last product is done
    out = work.matrix(tensors.out)
    lane = cute.arch.thread_idx()[0] % O_ROWS
    is_odd = Boolean(lane % 2 == 1)
    for tile in cutlass.range_constexpr(cfg.o_tiles):
        for first in cutlass.range_constexpr(0, HEADS, _COLUMNS):
            values = [Float32(0.0)] * _COLUMNS
            if work.count > 0:
                address = tmem.lane_address(context.tmem.O, _warp()) + (tile * HEADS + first)
                loaded = tmem.load(address, _COLUMNS)
                factors = factors_of(buffer_of(context, _BUFFERS), first)
                tmem.wait_loads()
                values = [x * factor for x, factor in zip(loaded, factors)]
            for i in cutlass.range_constexpr(0, _COLUMNS, 2):
                # Neighbouring lanes have neighbouring columns: each stores two columns of one of two heads.
                mine = Float32(cutlass.select_(is_odd, values[i + 1], values[i]))
                other = Float32(cutlass.select_(is_odd, values[i], values[i + 1]))
                other = cute.arch.shuffle_sync_bfly(other, offset=1)
                low = Float32(cutlass.select_(is_odd, other, mine))
                high = Float32(cutlass.select_(is_odd, mine, other))
                head = work.first + first + i + lane % 2
                if head < cfg.group:
                    at = out.iterator + cute.crd2idx((head, tile * O_ROWS + lane // 2 * 2), out.layout)
                    store_vec(at, [pack_half(low, high, cfg.dtype)])
