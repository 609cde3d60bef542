"""Compute role, eight warps: P and dS of each step, finally stores dQ.

A thread has a query head, and a quarter of the keys of a step. P and dS go to the CTA that has the keys, as transposed
left operands of dV and dK; dS also stays here, as left operand of dQ.

Waits:   mma_compute_{S,dP,dQ}.full
Signals: mma_compute_S.free, compute_mma_weights.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...bwd.device.list_work import SparseWork, work_tile
from ...core.scoring import Scoring
from ...core.vec_io import pack_half, store_vec
from ...pipeline.cursor import Cursor, consume, produce
from ...pipeline.ends import Ends
from ...pipeline.roles import WARP
from ...pipeline.row_chunks import store_row
from ...pipeline.smem import Tile
from .. import tmem
from ..bwd.pointwise import Factors, StepElements, band_words
from ..stages import CTA_ROWS, PANEL_COLUMNS
from .config import COLUMNS, D_COLUMNS, Gradient
from .context import Sm100SparseContext
from .load import rank_of
from .statistics import store_statistics

_THREADS = 8 * WARP


@cute.jit
def compute(context: Sm100SparseContext):
    ends, work, rank = context.ends("compute"), work_tile(context), rank_of()
    if work.count > 0:
        store_statistics(context, work, work.first + rank * CTA_ROWS, _THREADS)
        cute.arch.barrier(barrier_id=context.statistics_stored, number_of_threads=_THREADS)
        statistics = context.smem.pointer("statistics", Float32)
        rows = cute.make_tensor(statistics, cute.make_layout(2 * CTA_ROWS))
        minus_lse, minus_delta = Float32(rows[own_head()]), Float32(rows[CTA_ROWS + own_head()])
        scores, weights = consume(ends.mma_compute_S), produce(ends.compute_mma_weights)
        for i in cutlass.range(work.blocks(context), unroll=1):
            # Keys of the list from this thread's first one on.
            left = work.count - i * context.cfg.tile_n - key_half() * CTA_ROWS - warpgroup() * context.cfg.half
            if (i + 1) * context.cfg.tile_n > work.count:
                step(context, ends, rank, scores, weights, minus_lse, minus_delta, left, True)
            else:
                step(context, ends, rank, scores, weights, minus_lse, minus_delta, left, False)
            scores, weights = scores.next(), weights.next()
        consume(ends.mma_compute_dQ).wait()
    store_dq(context, work, rank)


def _warp() -> Int32:
    return cute.arch.make_warp_uniform(cute.arch.warp_idx())


def warpgroup() -> Int32:
    return _warp() // 4


def key_half() -> Int32:
    """CTA that has this thread's keys: lanes 64 to 127 of tensor memory have the second half of the columns."""
    return _warp() % 4 // 2


def own_head() -> Int32:
    """This thread's row among the heads of its CTA."""
    return cute.arch.thread_idx()[0] % CTA_ROWS


@cute.jit
def step(
    context: Sm100SparseContext,
    ends: Ends,
    rank: Int32,
    scores: Cursor,
    weights: Cursor,
    minus_lse: Float32,
    minus_delta: Float32,
    left: Int32,
    ends_here: cutlass.Constexpr[bool],
):
    """P and dS of a step. left: keys of the list from this thread's first one on. ends_here: the list ends in this
    step."""
    cfg, spans = context.cfg, context.tmem
    words = band_words(cfg, None, left) if const_expr(ends_here) else []
    factors = Factors(context.args.scale_log2, Float32(0.0), None)
    statistics = (lambda _: [minus_lse] * 4, lambda _: [minus_delta] * 4)
    elements = StepElements(cfg, context.args, Scoring(None, None, None), None, words, *statistics, factors)
    column = warpgroup() * cfg.half
    scores.wait()
    s = tmem.load(tmem.lane_address(spans.S, _warp()) + column, cfg.half)
    tmem.wait_loads()
    scores.arrive()
    p, packed_p = elements.probabilities(s)
    scores.at_iteration_of(consume(ends.mma_compute_dP)).wait()
    packed_ds = elements.score_gradients(p, tmem.lane_address(spans.dP, _warp()) + column)
    tmem.wait_loads()
    store_weights(context, rank, packed_p, packed_ds)
    weights.arrive()


@cute.jit
def store_weights(context: Sm100SparseContext, rank: Int32, p: list[Int32], ds: list[Int32]):
    """Store P and dS to the CTA that has the keys, and dS here."""
    cfg, head, half = context.cfg, own_head(), key_half()
    for group in cutlass.range_constexpr(2):
        if warpgroup() == group:
            column = group * cfg.half
            panel = context.smem.address("dS_keys") + half * (CTA_ROWS * 2 * PANEL_COLUMNS)
            store_row(panel, Tile(CTA_ROWS, PANEL_COLUMNS), head, column, ds)
            row = rank * CTA_ROWS + head
            for region, packed in (("P", p), ("dS", ds)):
                pointer = context.smem.pointer(region, Int32)
                if half == rank:
                    store_row(pointer.toint(), cfg.by_heads, row, column, packed)
                else:
                    remote = cute.arch.map_dsmem_ptr(pointer, half)
                    store_row(remote.toint(), cfg.by_heads, row, column, packed, cute.AddressSpace.dsmem)


@cute.jit
def store_dq(context: Sm100SparseContext, work: SparseWork, rank: Int32):
    """Scale dQ and store it; zeros if the list is empty."""
    cfg = context.cfg
    head = work.first + rank * CTA_ROWS + own_head()
    matrix = work.matrix(context.args.tensors.dq)
    for part in cutlass.range_constexpr(cfg.parts(Gradient.DQ)):
        for chunk in cutlass.range_constexpr(2):
            if warpgroup() == chunk:
                packed = [Int32(0)] * (cfg.half // 2)
                if work.count > 0:
                    address = tmem.lane_address(context.tmem.dQ, _warp()) + (part * D_COLUMNS + chunk * cfg.half)
                    x = tmem.load(address, cfg.half)
                    tmem.wait_loads()
                    for j in cutlass.range_constexpr(cfg.half // 2):
                        low, high = (y * context.args.scale for y in x[2 * j : 2 * j + 2])
                        packed[j] = pack_half(low, high, cfg.dtype)
                first = part * COLUMNS + key_half() * PANEL_COLUMNS + chunk * cfg.half
                if (head < cfg.group) & (first < cfg.head_dim):
                    target = matrix.iterator + cute.crd2idx((head, first), matrix.layout)
                    for i in cutlass.range_constexpr(0, len(packed), 4):
                        store_vec(target + 2 * i, packed[i : i + 4])
