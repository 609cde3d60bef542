"""Compute role, eight warps, one thread per key and half of the queries: computes P and dS, finally stores dV and dK.

Per step: P^T = exp2(S^T - lse), in 16 bits over S^T. dS^T = P^T (dP^T - delta), in 16 bits over dP^T for dK and in
shared memory for dQ. P stays in registers between the two. In a CTA pair, each CTA keeps dS of its half of the queries
in its own shared memory and writes the other half to the shared memory of the other CTA.

Waits:   load_compute_rows.full, mma_compute_{S,dP,dV,dK}.full
Signals: compute_mma_P.full, compute_mma_dS.full
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...bwd.device.captured_grads import CapturedGrads
from ...core.dropout import Dropout
from ...core.fragment_coords import FragmentCoords
from ...core.fragment_values import FragmentValues
from ...core.traced import bind
from ...core.vec_io import load_floats
from ...pipeline.cursor import Cursor, consume
from ...pipeline.ends import Ends
from ...pipeline.roles import WARP
from ...pipeline.row_chunks import store_row
from .. import tmem
from ..block_scales import write_ones
from .config import CHUNK, HALVES, TILE_N, Sm100BackwardSteps, unpacked_columns
from .context import Sm100BackwardContext, Sm100StepsContext
from .epilogue import store_gradients
from .pointwise import Factors, RowStatistic, StepElements, band_words, scoring_of
from .work import Sm100BackwardWork, work_tile


@cute.jit
def compute(context: Sm100BackwardContext):
    cfg = context.cfg
    ends = context.ends("compute")
    work = work_tile(context)
    lane = cute.arch.thread_idx()[0] % TILE_N
    # The statistics mask rows past the last query.
    first, stop = work.mask.queries(work.own_block * TILE_N + lane)
    rows = consume(ends.load_compute_rows)
    s, dp = consume(ends.mma_compute_S), consume(ends.mma_compute_dP)
    factors = Factors.of(cfg, context.args, work.batch, work.head_kv)
    if const_expr(cfg.has_block_scales):  # noqa: SIM102  complete when P is stored, which mma waits for
        if (work.steps > 0) & (half_of_warp() == 0):
            write_ones(context.tmem.ones)

    for member in cutlass.range(cfg.group, unroll=1):
        of_head = work.of_head(context, member)
        for i in cutlass.range(of_head.first, of_head.stop, unroll=1):
            m_block = of_head.block(i)
            first_query = m_block * cfg.tile_m + half_of_warp() * cfg.half
            queries = StepQueries(member, first_query, first - first_query, stop - first_query)
            if const_expr(cfg.has_blocks):
                if i < of_head.block_iter.masked:
                    step(context, ends, rows, s, s.at_iteration_of(dp), work, queries, factors, True, True)
                elif (work.own_block + 1) * TILE_N > work.k.count:
                    step(context, ends, rows, s, s.at_iteration_of(dp), work, queries, factors, True, False)
                else:
                    step(context, ends, rows, s, s.at_iteration_of(dp), work, queries, factors, False, False)
            elif work.needs_mask(m_block, cfg):
                step(context, ends, rows, s, s.at_iteration_of(dp), work, queries, factors, True, True)
            else:
                step(context, ends, rows, s, s.at_iteration_of(dp), work, queries, factors, False, True)
            rows, s = rows.next(), s.next()
    store_gradients(context, ends, work)


class StepQueries(NamedTuple):
    """This warp's half of the queries of a step: from query `begin` on, for a query head of the group. Queries
    first <= i < stop, relative to `begin`, see the key."""

    member: Int32
    begin: Int32
    first: Int32  # at most 0 if the band has no right bound
    stop: Int32


def bind_mods(
    context: Sm100StepsContext, work: Sm100BackwardWork, queries: StepQueries, applies_mask_mod: bool
) -> tuple[FragmentValues | None, FragmentValues | None]:
    """Fragment values of a step for score_mod and mask_mod. applies_mask_mod: False if the block list says that nothing
    is masked there."""
    cfg, args, lengths = context.cfg, context.args, (work.q.count, work.k.count)
    head, key = work.head_kv * cfg.group + queries.member, own_row(cfg, work.own_block)
    score_mod, mask_mod = bind(cfg.mods, args.mods, work.batch, head, lengths)
    coords = FragmentCoords((key,), queries.begin, cfg.half, cols_are_keys=False, run=1, period=1)
    score = None if score_mod is None else score_mod.at(coords, args.scale)
    mask = None if mask_mod is None or not applies_mask_mod else mask_mod.at(coords)
    if mask is not None:
        mask.precompute_mask()
    return score, mask


def keep_bits_of(context: Sm100StepsContext, work: Sm100BackwardWork, queries: StepQueries) -> list[Int32] | None:
    """32-bit words of dropout keep bits of this thread's elements of a step; None without dropout."""
    cfg, warp = context.cfg, cute.arch.make_warp_uniform(cute.arch.warp_idx())
    dropout = Dropout.of(cfg.mods, context.args.mods, work.batch, work.head_kv * cfg.group + queries.member)
    if dropout is None:
        return None
    first_key = work.own_block * cfg.cta_tile_n + warp % (cfg.cta_tile_n // WARP) * WARP
    return dropout.by_keys(queries.begin, cfg.half, first_key)


def half_of_warp() -> Int32:
    """Index (0 or 1) of this warp's compute warpgroup."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4


def first_column(cfg: Sm100BackwardSteps) -> Int32:
    """First of this warp's columns of a step."""
    column = half_of_warp() * cfg.half
    if cfg.lane_columns == cfg.tile_m:
        return column
    return column + cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 // 2 * cfg.lane_columns


def own_row(cfg: Sm100BackwardSteps, own_block: Int32) -> Int32:
    """This thread's row among those that CTAs own."""
    return own_block * cfg.cta_tile_n + cute.arch.thread_idx()[0] % cfg.cta_tile_n


@cute.jit
def step(
    context: Sm100BackwardContext,
    ends: Ends,
    statistics: Cursor,
    scores: Cursor,
    gradients: Cursor,
    work: Sm100BackwardWork,
    queries: StepQueries,
    factors: Factors,
    applies_band: cutlass.Constexpr[bool],
    applies_mask_mod: cutlass.Constexpr[bool],
):
    """Process one block of queries. applies_band, applies_mask_mod: the band or a mask_mod may mask some."""
    cfg, args, spans = context.cfg, context.args, context.tmem
    score, mask = bind_mods(context, work, queries, applies_mask_mod)
    keep_bits = keep_bits_of(context, work, queries)
    half = half_of_warp()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.thread_idx()[0] % TILE_N
    s_address = tmem.lane_address(spans.S, warp) + half * cfg.half
    dp_address = tmem.lane_address(spans.dP, warp) + half * cfg.half
    packed_column = half * unpacked_columns(cfg)  # the second half is stored, packed, at the end of its columns
    rows = context.smem.pointer("rows", Float32) + (statistics.stage * (2 * cfg.tile_m) + half * cfg.half)
    minus_lse, minus_delta = rows, rows + cfg.tile_m

    statistics.wait()
    scores.wait()
    s = []
    for column in cutlass.range_constexpr(0, cfg.half, CHUNK):
        s += tmem.load(s_address + column, CHUNK)
    tmem.wait_loads()
    words = []
    if const_expr(applies_band):
        has_first = work.mask.right is not None
        words = band_words(cfg, queries.first if const_expr(has_first) else None, queries.stop)
    scoring, statistics_of = scoring_of(cfg, factors, score, mask), (four_of(minus_lse), four_of(minus_delta))
    elements = StepElements(cfg, args, scoring, keep_bits, words, *statistics_of, factors)
    p, packed = elements.probabilities(s)
    tmem.store(s_address + packed_column, packed)
    tmem.wait_stores()
    ends.compute_mma_P.arrive_full(0)

    gradients.wait()
    packed = elements.score_gradients(p, dp_address)
    if const_expr(score is not None):
        captured = CapturedGrads.of(args.mods.captured, cfg, work.batch, work.k, args.seqlen_k, work.own_block)
        if const_expr(captured is not None):
            captured.add(score, [p])
    tmem.wait_loads()  # dS overwrites dP; registers themselves are interlocked
    tmem.store(dp_address + packed_column, packed)
    if const_expr(cfg.ctas == 2):
        share_ds(context, half, work.rank, lane, packed)
    else:
        for i_half in cutlass.range_constexpr(HALVES):
            if half == i_half:
                store_row(context.smem.address("dS"), cfg.ds_tile, lane, i_half * cfg.half, packed)
    tmem.wait_stores()
    ends.compute_mma_dS.arrive_full(0)


def four_of(values: cute.Pointer) -> RowStatistic:
    """Read a row statistic of a step from shared memory."""
    return lambda i: load_floats(values + i, 4)


@cute.jit
def share_ds(context: Sm100BackwardContext, half: Int32, rank: Int32, lane: Int32, packed: list):
    """CTA pair: store dS of this warpgroup's half of the queries in the CTA that owns the half."""
    tile, ds_ptr = context.cfg.ds_tile, context.smem.pointer("dS", Int32)
    row = rank * TILE_N + lane
    if half == rank:
        store_row(ds_ptr.toint(), tile, row, 0, packed)
    else:
        remote_ptr = cute.arch.map_dsmem_ptr(ds_ptr, half)
        store_row(remote_ptr.toint(), tile, row, 0, packed, cute.AddressSpace.dsmem)
