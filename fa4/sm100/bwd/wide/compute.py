"""Compute role, eight warps: P of dV, or P and dS of dK and dQ; finally stores the gradient.

A thread has one owned row (a key, or a query of dQ) and half of the columns of a step. P is written over S, and dS over
dP, in 16 bits. S of dK and dQ is free as soon as it is in registers.

Waits:   load_compute_rows.full, mma_compute_{S,dP,D}.full
Signals: compute_mma_weights.full, mma_compute_S.free, load_compute_rows.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ....bwd.device.captured_grads import CapturedGrads
from ....core.dropout import Dropout
from ....core.fragment_coords import FragmentCoords
from ....core.fragment_values import FragmentValues
from ....core.traced import bind
from ....pipeline.cursor import Cursor, consume, produce
from ....pipeline.ends import Ends
from ....pipeline.row_chunks import store_row
from ... import tmem
from ..compute import StepQueries, bind_mods, first_column, four_of, half_of_warp, keep_bits_of, own_row
from ..config import CHUNK, HALVES
from ..pointwise import Factors, StepElements, band_words, scoring_of
from ..work import Sm100BackwardWork
from ..work import work_tile as key_work
from .config import Gradient
from .context import Sm100WideContext
from .epilogue import store_gradient
from .work import QueryWork, query_work


@cute.jit
def compute(context: Sm100WideContext):
    if const_expr(context.cfg.gradient.owns_keys):
        compute_by_keys(context)
    else:
        compute_by_queries(context)


@cute.jit
def compute_by_keys(context: Sm100WideContext):
    """dV or dK of a thread's key, query block by query block of each query head of the group."""
    cfg, ends, work = context.cfg, context.ends("compute"), key_work(context)
    # The statistics mask rows past the last query.
    first, stop = work.mask.queries(own_row(cfg, work.own_block))
    rows, scores = consume(ends.load_compute_rows), consume(ends.mma_compute_S)
    weights = produce(ends.compute_mma_weights)
    for member in cutlass.range(cfg.group, unroll=1):
        of_head = work.of_head(context, member)
        for i in cutlass.range(of_head.first, of_head.stop, unroll=1):
            m_block = of_head.block(i)
            first_query = m_block * cfg.tile_m + first_column(cfg)
            queries = StepQueries(member, first_query, first - first_query, stop - first_query)
            if const_expr(cfg.has_blocks):
                if i < of_head.block_iter.masked:
                    step_of_keys(context, ends, rows, scores, weights, work, queries, True, True)
                elif (work.own_block + 1) * cfg.cta_tile_n > work.k.count:
                    step_of_keys(context, ends, rows, scores, weights, work, queries, True, False)
                else:
                    step_of_keys(context, ends, rows, scores, weights, work, queries, False, False)
            elif work.needs_mask(m_block, cfg):
                step_of_keys(context, ends, rows, scores, weights, work, queries, True, True)
            else:
                step_of_keys(context, ends, rows, scores, weights, work, queries, False, True)
            rows, scores, weights = rows.next(), scores.next(), weights.next()
    scale = Float32(1.0) if const_expr(cfg.gradient is Gradient.DV) else context.args.scale
    store_gradient(context, ends, work, work.k, scale)


@cute.jit
def step_of_keys(
    context: Sm100WideContext,
    ends: Ends,
    statistics: Cursor,
    scores: Cursor,
    weights: Cursor,
    work: Sm100BackwardWork,
    queries: StepQueries,
    applies_band: cutlass.Constexpr[bool],
    applies_mask_mod: cutlass.Constexpr[bool],
):
    """Process one block of queries. applies_band, applies_mask_mod: the band or a mask_mod may mask some."""
    cfg, args = context.cfg, context.args
    score, mask = bind_mods(context, work, queries, applies_mask_mod)
    keep_bits = keep_bits_of(context, work, queries)
    minus_lse = context.smem.pointer("rows", Float32) + (statistics.stage * (2 * cfg.tile_m) + first_column(cfg))
    words = []
    if const_expr(applies_band):
        has_first = work.mask.right is not None
        words = band_words(cfg, queries.first if const_expr(has_first) else None, queries.stop)
    minus_delta, factors = minus_lse + cfg.tile_m, Factors.of(cfg, args)
    scoring, statistics_of = scoring_of(cfg, factors, score, mask), (four_of(minus_lse), four_of(minus_delta))
    elements = StepElements(cfg, args, scoring, keep_bits, words, *statistics_of, factors)
    statistics.wait()
    p = finish_step(context, ends, scores, weights, elements)
    statistics.arrive()
    if const_expr(cfg.gradient.needs_dp and score is not None):
        captured = CapturedGrads.of(args.mods.captured, cfg, work.batch, work.k, args.seqlen_k, work.own_block)
        if const_expr(captured is not None):
            captured.add(score, [p])


def finish_step(
    context: Sm100WideContext, ends: Ends, scores: Cursor, weights: Cursor, elements: StepElements
) -> list[Float32]:
    """Turn S into P of dV, or dP into dS. Return P times the softcap's derivative."""
    cfg, spans = context.cfg, context.tmem
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    half = half_of_warp()
    s_address = tmem.lane_address(spans.S, warp) + (scores.stage * cfg.lane_columns + half * cfg.half)
    scores.wait()
    s = []
    for column in range(0, cfg.half, CHUNK):
        s += tmem.load(s_address + column, CHUNK)
    tmem.wait_loads()
    if cfg.gradient.needs_dp:
        scores.arrive()
    p, packed = elements.probabilities(s)
    target = s_address
    if cfg.gradient.needs_dp:
        gradients = scores.at_iteration_of(consume(ends.mma_compute_dP))
        gradients.wait()
        target = tmem.lane_address(spans.dP, warp) + half * cfg.half
        packed = elements.score_gradients(p, target)
        tmem.wait_loads()  # dS overwrites dP
    if cfg.weights_tile is None:
        # The second half is stored, packed, at the end of its columns.
        tmem.store(target + half * (cfg.half // 2), packed)
        tmem.wait_stores()
    else:
        store_weights(context, weights.stage, packed)
    weights.arrive()
    return p


@cute.jit
def store_weights(context: Sm100WideContext, stage: Int32, packed: list[Int32]):
    """Write this thread's P or dS to shared memory. A panel has the columns of a lane of tensor memory."""
    cfg, tile = context.cfg, context.cfg.weights_tile
    panel = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 // 2
    address = context.smem.address("weights") + (stage * tile.nbytes + panel * tile.panel_bytes)
    for i_half in cutlass.range_constexpr(HALVES):
        if half_of_warp() == i_half:
            store_row(address, tile, own_row(cfg, 0), i_half * cfg.half, packed)


@cute.jit
def compute_by_queries(context: Sm100WideContext):
    """dQ of a thread's query, key block by key block."""
    cfg, ends, work = context.cfg, context.ends("compute"), query_work(context)
    row = own_row(cfg, work.own_block)
    statistics = row_statistics(context, work, row)
    first, stop = work.mask.keys(row)
    scores, weights = consume(ends.mma_compute_S), produce(ends.compute_mma_weights)
    for i in cutlass.range(work.steps, unroll=1):
        n_block = work.block(i)
        begin = n_block * cfg.tile_m + first_column(cfg)
        keys = (begin, first - begin, stop - begin)
        if const_expr(cfg.has_blocks):
            if i < work.block_iter.masked:
                step_of_queries(context, ends, scores, weights, work, row, statistics, keys, True, True)
            elif i >= work.block_iter.count - work.block_iter.cut:
                step_of_queries(context, ends, scores, weights, work, row, statistics, keys, True, False)
            else:
                step_of_queries(context, ends, scores, weights, work, row, statistics, keys, False, False)
        elif work.needs_mask(n_block, cfg):
            step_of_queries(context, ends, scores, weights, work, row, statistics, keys, True, True)
        else:
            step_of_queries(context, ends, scores, weights, work, row, statistics, keys, False, True)
        scores, weights = scores.next(), weights.next()
    store_gradient(context, ends, work, work.q, context.args.scale)


def row_statistics(context: Sm100WideContext, work: QueryWork, row: Int32) -> tuple[Float32, Float32]:
    """-lse * log2(e) and -delta of a query; -inf and 0 past the last one."""
    cfg, exists = context.cfg, row < work.q.count
    clamped = cutlass.max(cutlass.min(row, work.q.count - 1), 0)
    block = work.row_block + clamped // cfg.tile_m
    minus_lse, minus_delta = (context.args.statistics[clamped % cfg.tile_m, i, block, work.head] for i in (0, 1))
    return (
        Float32(cutlass.select_(exists, minus_lse, -Float32.inf)),
        Float32(cutlass.select_(exists, minus_delta, Float32(0.0))),
    )


@cute.jit
def step_of_queries(
    context: Sm100WideContext,
    ends: Ends,
    scores: Cursor,
    weights: Cursor,
    work: QueryWork,
    row: Int32,
    statistics: tuple[Float32, Float32],
    keys: tuple[Int32, Int32, Int32],
    applies_band: cutlass.Constexpr[bool],
    applies_mask_mod: cutlass.Constexpr[bool],
):
    """Process one block of keys. keys: this warp's first one; relative to it, the keys first <= j < stop that the query
    sees."""
    cfg, args = context.cfg, context.args
    begin, first, stop = keys
    score, mask = bind_to_query(context, work, row, begin, applies_mask_mod)
    dropout = Dropout.of(cfg.mods, args.mods, work.batch, work.head)
    keep_bits = None if const_expr(dropout is None) else dropout.words(row, begin, cfg.half)
    words = band_words(cfg, first if const_expr(cfg.has_left) else None, stop) if const_expr(applies_band) else []
    minus_lse, minus_delta = statistics
    factors, statistics_of = Factors.of(cfg, args), (lambda _: [minus_lse] * 4, lambda _: [minus_delta] * 4)
    scoring = scoring_of(cfg, factors, score, mask)
    elements = StepElements(cfg, args, scoring, keep_bits, words, *statistics_of, factors)
    finish_step(context, ends, scores, weights, elements)


def bind_to_query(
    context: Sm100WideContext, work: QueryWork, row: Int32, begin: Int32, applies_mask_mod: bool
) -> tuple[FragmentValues | None, FragmentValues | None]:
    """Fragment values of a step for score_mod and mask_mod, for keys from `begin` on."""
    cfg, args, lengths = context.cfg, context.args, (work.q.count, work.k.count)
    score_mod, mask_mod = bind(cfg.mods, args.mods, work.batch, work.head, lengths)
    coords = FragmentCoords((row,), begin, cfg.half, run=1, period=1)
    score = None if score_mod is None else score_mod.at(coords, args.scale)
    mask = None if mask_mod is None or not applies_mask_mod else mask_mod.at(coords)
    if mask is not None:
        mask.precompute_mask()
    return score, mask
