"""Compute role, eight warps: a thread has one key and half of a step's queries; finally dV and dK.

Per step: P^T = exp2(S^T - lse), in 16 bits over S^T; dS^T = P^T (dP^T - delta), in 16 bits over dP^T for dK and in
shared memory for dQ. P stays in registers between the two. In a pair of CTAs each keeps one half of the queries' dS in
its shared memory and writes the other into the other CTA's.

Waits:   load_compute_rows.full, mma_compute_{S,dP,dV,dK}.full
Signals: compute_mma_P.full, compute_mma_dS.full
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.captured_grads import CapturedGrads
from ...core.dropout import Dropout, dropped
from ...core.fragment_coords import FragmentCoords
from ...core.fragment_values import FragmentValues
from ...core.mask_bits import apply_mask_unless, mask_bits
from ...core.score import SoftcapAgain
from ...core.scoring import Scoring
from ...core.traced import bind
from ...core.vec_io import load_floats, pack_half
from ...pipeline.cursor import Cursor, consume
from ...pipeline.smem import store_row
from .. import tmem
from ..exp2 import exp2_mufu, exp2_polynomial, is_polynomial
from .config import CHUNK, HALVES, TILE_N
from .epilogue import store_gradients
from .work import work_tile


@cute.jit
def compute(context):
    cfg = context.cfg
    ends = context.ends("compute")
    work = work_tile(context)
    lane = cute.arch.thread_idx()[0] % TILE_N
    first, stop = work.mask.queries(work.own_block * TILE_N + lane)  # statistics hide rows past the last query
    rows = consume(ends.load_compute_rows)
    s, dp = consume(ends.mma_compute_S), consume(ends.mma_compute_dP)

    for member in cutlass.range(cfg.group, unroll=1):
        of_head = work.of_head(context, member)
        for i in cutlass.range(of_head.first, of_head.stop, unroll=1):
            m_block = of_head.block(i)
            begin = m_block * cfg.tile_m + half_of_warp() * cfg.half
            at = At(member, begin, first - begin, stop - begin)
            if cutlass.const_expr(cfg.has_blocks):
                if i < of_head.block_iter.masked:
                    step(context, ends, rows, s, s.in_step(dp), work, at, True, True)
                elif (work.own_block + 1) * TILE_N > work.k.count:
                    step(context, ends, rows, s, s.in_step(dp), work, at, True, False)
                else:
                    step(context, ends, rows, s, s.in_step(dp), work, at, False, False)
            elif work.cuts(m_block):
                step(context, ends, rows, s, s.in_step(dp), work, at, True, True)
            else:
                step(context, ends, rows, s, s.in_step(dp), work, at, False, True)
            rows, s = rows.next(), s.next()
    store_gradients(context, ends, work)


class At(NamedTuple):
    """A step's queries of this warp's half: those of a query head of the group from `begin` on, of which first <= query
    < stop, counted from there, see the key."""

    member: Int32
    begin: Int32
    first: Int32  # at most 0 unless the mask bounds the right side
    stop: Int32


def mods_at(context, work, at: At, asks_mask: bool) -> tuple[FragmentValues | None, FragmentValues | None]:
    """This thread's elements of a step as a score_mod and a mask_mod see them. asks_mask: whether a mask_mod may hide
    something there."""
    cfg, args, lengths = context.cfg, context.args, (work.q.count, work.k.count)
    head, key = work.head_kv * cfg.group + at.member, work.own_block * TILE_N + cute.arch.thread_idx()[0] % TILE_N
    score_mod, mask_mod = bind(cfg.mods, args.mods, work.batch, head, lengths)
    places = FragmentCoords((key,), at.begin, cfg.half, keys_across=False, run=1, period=1)
    score = None if score_mod is None else score_mod.at(places, args.scale)
    mask = None if mask_mod is None or not asks_mask else mask_mod.at(places)
    if mask is not None:
        mask.see_ahead()
    return score, mask


def kept_at(context, work, at: At) -> list[Int32] | None:
    """Words of keep bits of this thread's elements of a step, if there is dropout."""
    cfg, warp = context.cfg, cute.arch.make_warp_uniform(cute.arch.warp_idx())
    dropout = Dropout.of(cfg.mods, context.args.mods, work.batch, work.head_kv * cfg.group + at.member)
    if dropout is None:
        return None
    return dropout.by_keys(at.begin, cfg.half, work.own_block * TILE_N + warp % 4 * 32)


def half_of_warp() -> Int32:
    """Which half of the queries this warp has."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4


@cute.jit
def step(
    context,
    ends,
    statistics: Cursor,
    scores: Cursor,
    gradients: Cursor,
    work,
    at: At,
    is_cut: cutlass.Constexpr[bool],
    asks_mask: cutlass.Constexpr[bool],
):
    """One block of queries. is_cut: the band may hide the key from some of them; asks_mask: a mask_mod may."""
    cfg, args, spans = context.cfg, context.args, context.tmem
    score, mask = mods_at(context, work, at, asks_mask)
    kept = kept_at(context, work, at)
    half = half_of_warp()
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.thread_idx()[0] % TILE_N
    s_address = tmem.lane_address(spans.S, warp) + half * cfg.half
    dp_address = tmem.lane_address(spans.dP, warp) + half * cfg.half
    packed = half * (cfg.half // 2)  # the second half goes, packed, to the end of its columns
    rows = context.smem.pointer("rows", Float32) + (statistics.stage * (2 * cfg.tile_m) + half * cfg.half)
    minus_lse, minus_delta = rows, rows + cfg.tile_m

    statistics.wait()
    scores.wait()
    s = []
    for column in cutlass.range_constexpr(0, cfg.half, CHUNK):
        s += tmem.load(s_address + column, CHUNK)
    tmem.wait_loads()
    stages = Scoring(SoftcapAgain(args.scale_over_cap) if cfg.has_softcap else None, score, mask)
    logits = stages.logits([s])
    (s,) = stages.masked(logits, lambda _, i: load_floats(minus_lse + i // 4 * 4, 4)[i % 4])
    visible = []
    if cutlass.const_expr(is_cut):
        has_first = work.mask.right is not None
        visible = [mask_bits(at.first if has_first else None, at.stop, query) for query in range(0, cfg.half, 32)]
    p, words = [], []
    for pair in cutlass.range_constexpr(cfg.half // 2):
        if cutlass.const_expr(pair % 2 == 0):
            lse = load_floats(minus_lse + 2 * pair, 4)
        both = s[2 * pair : 2 * pair + 2]
        scales = (args.scale_log2, args.scale_log2)
        x = cute.arch.fma_packed_f32x2(tuple(both), scales, tuple(lse[2 * (pair % 2) : 2 * (pair % 2) + 2]))
        if cutlass.const_expr(is_cut):
            word, bit = visible[2 * pair // 32], 2 * pair % 32
            x = apply_mask_unless(word, bit, x[0]), apply_mask_unless(word, bit + 1, x[1])
        if cutlass.const_expr(is_polynomial(pair, cfg.polynomial)):
            weights = exp2_polynomial(*x)
        else:
            weights = exp2_mufu(x[0]), exp2_mufu(x[1])
        factors = factors_at(context, kept, 2 * pair)
        for_dv = weights
        if cutlass.const_expr(factors is not None):
            for_dv = cute.arch.mul_packed_f32x2(tuple(weights), factors)
        words.append(pack_half(for_dv[0], for_dv[1], cfg.dtype))
        p += stages.sloped([list(weights)], [logits[0][2 * pair : 2 * pair + 2]])[0]
    tmem.store(s_address + packed, words)
    tmem.wait_stores()
    ends.compute_mma_P.arrive_full(0)

    gradients.wait()
    words, grads = [], []
    for column in cutlass.range_constexpr(0, cfg.half, CHUNK):
        dp = tmem.load(dp_address + column, CHUNK)
        for i in cutlass.range_constexpr(0, CHUNK, 4):
            delta = load_floats(minus_delta + (column + i), 4)
            for j in cutlass.range_constexpr(0, 4, 2):
                place = column + i + j
                factors = factors_at(context, kept, place)
                if cutlass.const_expr(factors is None):
                    ds = cute.arch.add_packed_f32x2((dp[i + j], dp[i + j + 1]), tuple(delta[j : j + 2]))
                else:
                    ds = cute.arch.fma_packed_f32x2((dp[i + j], dp[i + j + 1]), factors, tuple(delta[j : j + 2]))
                ds = cute.arch.mul_packed_f32x2((p[place], p[place + 1]), ds)
                grads += ds
                if cutlass.const_expr(score is None):
                    words.append(pack_half(ds[0], ds[1], cfg.dtype))
    if cutlass.const_expr(score is not None):
        (grads,) = stages.slopes([p], [grads])
        words = [pack_half(grads[i], grads[i + 1], cfg.dtype) for i in range(0, cfg.half, 2)]
        captured = CapturedGrads.of(args.mods.captured, cfg, work.batch, work.k, args.seqlen_k, work.own_block)
        if cutlass.const_expr(captured is not None):
            captured.add(score, [p])
    tmem.wait_loads()  # dS goes over dP; a register that a load fills waits for its own value
    tmem.store(dp_address + packed, words)
    if cutlass.const_expr(cfg.ctas == 2):
        share_ds(context, half, work.rank, lane, words)
    else:
        for own in cutlass.range_constexpr(HALVES):
            if half == own:
                store_row(context.smem.address("dS"), cfg.ds_tile, lane, own * cfg.half, words)
    tmem.wait_stores()
    ends.compute_mma_dS.arrive_full(0)


def factors_at(context, kept: list[Int32] | None, i: int) -> tuple[Float32, Float32] | None:
    """What P and dP of elements i and i + 1 are multiplied by: 1 / (1 - p), or 0 where dropped."""
    if kept is None:
        return None
    scale = context.args.mods.dropout.scale
    return dropped(kept, i, scale), dropped(kept, i + 1, scale)


@cute.jit
def share_ds(context, half: Int32, rank: Int32, lane: Int32, words: list):
    """A pair: this warpgroup's half of the queries goes to the CTA that has it, which is this one or the other."""
    tile, place = context.cfg.ds_tile, context.smem.pointer("dS", Int32)
    row = rank * TILE_N + lane
    if half == rank:
        store_row(place.toint(), tile, row, 0, words)
    else:
        other = cute.arch.map_dsmem_ptr(place, half)
        store_row(other.toint(), tile, row, 0, words, cute.AddressSpace.dsmem)
