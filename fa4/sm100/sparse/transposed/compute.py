"""Compute role, eight warps: P and dS of each step, finally stores dQ.

A thread has a key of a step and half of the heads. P and dS are the left operands of dV and dK, in tensor memory; dS
also goes to shared memory, as right operand of dQ.

Waits:   mma_compute_{S,dP,dQ}.full, compute_mma_{dS,weights}.free
Signals: mma_compute_{S,dP}.free, compute_mma_{dS,weights}.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ....bwd.device.list_work import SparseWork, work_tile
from ....core.scoring import Scoring
from ....core.vec_io import load_floats
from ....pipeline.cursor import Cursor, consume, produce
from ....pipeline.ends import Ends
from ....pipeline.roles import WARP
from ....pipeline.row_chunks import store_row
from ... import tmem
from ...bwd.pointwise import Factors, RowStatistic, StepElements
from ..statistics import store_statistics
from .config import DS_TILE, HEADS, KEYS
from .context import Sm100TransposedContext

_THREADS = 8 * WARP


@cute.jit
def compute(context: Sm100TransposedContext):
    ends, work = context.ends("compute"), work_tile(context)
    if work.count > 0:
        store_statistics(context, work, work.first, _THREADS)
        cute.arch.barrier(barrier_id=context.statistics_stored, number_of_threads=_THREADS)
        scores, weights = consume(ends.mma_compute_S), produce(ends.compute_mma_weights)
        for i in cutlass.range(work.blocks(context), unroll=1):
            step(context, ends, scores, weights, Boolean(i * KEYS + own_key() < work.count))
            scores, weights = scores.next(), weights.next()
        consume(ends.mma_compute_dQ).wait()
    store_dq(context, work)


def _warp() -> Int32:
    return cute.arch.make_warp_uniform(cute.arch.warp_idx())


def warpgroup() -> Int32:
    return _warp() // 4


def own_key() -> Int32:
    """This thread's key of a step."""
    return cute.arch.thread_idx()[0] % KEYS


def four_of(values: cute.Pointer) -> RowStatistic:
    return lambda i: load_floats(values + i, 4)


@cute.jit
def step(context: Sm100TransposedContext, ends: Ends, scores: Cursor, weights: Cursor, exists: Boolean):
    """P and dS of a step. exists: whether the list has this thread's key."""
    cfg, spans, column = context.cfg, context.tmem, warpgroup() * context.cfg.half
    minus_lse = context.smem.pointer("statistics", Float32) + column
    statistics = four_of(minus_lse), four_of(minus_lse + HEADS)
    words = [Int32(cutlass.select_(exists, Int32(-1), Int32(0)))]  # a bit for each of the thread's heads
    factors = Factors(context.args.scale_log2, Float32(0.0), None)
    elements = StepElements(cfg, context.args, Scoring(None, None, None), None, words, *statistics, factors)
    scores.wait()
    s = tmem.load(tmem.lane_address(spans.S, _warp()) + column, cfg.half)
    tmem.wait_loads()
    scores.arrive()
    p, packed_p = elements.probabilities(s)
    gradients = scores.at_iteration_of(consume(ends.mma_compute_dP))
    gradients.wait()
    packed_ds = elements.score_gradients(p, tmem.lane_address(spans.dP, _warp()) + column)
    tmem.wait_loads()
    gradients.arrive()
    ds = weights.at_iteration_of(produce(ends.compute_mma_dS))
    ds.wait()
    for group in cutlass.range_constexpr(2):
        if warpgroup() == group:
            store_row(context.smem.address("dS"), DS_TILE, own_key(), group * cfg.half, packed_ds)
    ds.arrive()
    weights.wait()
    for span, packed in ((spans.P, packed_p), (spans.dS, packed_ds)):
        tmem.store(tmem.lane_address(span, _warp()) + warpgroup() * (cfg.half // 2), packed)
    tmem.wait_stores()
    weights.arrive()


@cute.jit
def store_dq(context: Sm100TransposedContext, work: SparseWork):
    """Scale dQ and store it; zeros if the list is empty. Lanes of dQ are its columns."""
    cfg, lane = context.cfg, cute.arch.thread_idx()[0] % KEYS
    dq = work.matrix(context.args.tensors.dq)
    panels = cfg.q_tile.panels
    for tile in cutlass.range_constexpr(-(-panels // 2)):
        if const_expr(tile < cfg.dq_tiles):
            column, is_used = tile * KEYS + lane, Boolean(True)
        else:  # 64 rows of a product: 16 lanes of each warp
            column = tile * KEYS + lane // WARP * (WARP // 2) + lane % WARP
            is_used = Boolean(lane % WARP < WARP // 2)
        for chunk in cutlass.range_constexpr(2):
            if warpgroup() == chunk:
                values = [Float32(0.0)] * cfg.half
                if work.count > 0:
                    address = tmem.lane_address(context.tmem.dQ, _warp()) + (tile * HEADS + chunk * cfg.half)
                    loaded = tmem.load(address, cfg.half)
                    tmem.wait_loads()
                    values = [x * context.args.scale for x in loaded]
                if is_used:
                    for j in cutlass.range_constexpr(cfg.half):
                        head = work.first + chunk * cfg.half + j
                        if head < cfg.group:
                            dq[head, column] = values[j].to(cfg.dtype)
