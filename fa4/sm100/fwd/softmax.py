"""Softmax role, one warpgroup per Q tile: turns S into P, with one thread per row.

Per key block: read S, compute the row max, send the rescale factor of O to correction, and write P = exp2(S - max) over
S, in two parts (head and tail). At the end: log-sum-exp to global memory, 1 / row sum to correction. With P in shared
memory, `smem_p` has the step: it rescales O itself, and its waits and signals are other ones.

Waits:   mma_softmax_S.full, softmax_correction_scale.free, softmax_correction_norm.free
Signals: softmax_correction_scale.full, mma_softmax_S.free, softmax_mma_Ptail.full, softmax_correction_norm.full
"""

from __future__ import annotations

import functools
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...core.vec_io import Packed, rounded
from ...fwd.device.rows import is_written, normalise, query_of, result, row_coord_of
from ...fwd.device.scales import Scales, factor
from ...pipeline.cursor import Cursor, Lane, consume, produce
from ...pipeline.ends import Ends
from .. import tmem
from ..block_scales import write_ones
from ..exp2 import exp2_mufu
from .config import Sm100ForwardConfig
from .context import Sm100ForwardContext
from .row_softmax import (
    RowInBlock,
    RowKeys,
    finite_offset,
    load_scores,
    load_scores_and_maximum,
    offset_and_factor,
    over_blocks,
    packed_sum,
    row_maximum,
)
from .smem_p import counted_p, smem_p_step
from .work import Queue, row_tile, rows_in_smem

STORE_KEYS = 32  # keys whose P one tcgen05.st stores


@cute.jit
def softmax(context: Sm100ForwardContext):
    cfg, context = context.cfg, context.with_tmem_addresses()
    ends = context.ends("softmax")
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tile = warp // 4
    s = consume(ends.mma_softmax_S, Lane(tile, cfg.q_tiles))
    norms = produce(ends.softmax_correction_norm, tile)
    norm_rows = rows_in_smem(context, "norm")
    if const_expr(cfg.has_block_scales):  # the first signal that P is full tells mma
        write_ones(context.tmem.P_scales, tile)
        tmem.wait_stores()
    step = functools.partial(smem_p_step if const_expr(cfg.p_in_smem) else softmax_step, context, ends, tile)

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        row = row_tile(context, work, tile) * cfg.tile_m + thread % cfg.tile_m
        query = query_of(cfg, row)
        state: tuple[Any, ...] = (-Float32.inf, Float32(0.0), -Float32.inf)
        if const_expr(cfg.drops_8bit_p):
            state = (*state, Float32(0.0))
        elif const_expr(cfg.p_in_smem):
            state = (*state, -Float32.inf)
        if work.count > 0:
            row_keys = RowKeys.of(context, work, row, query)
            state, s = over_blocks(context, work, row_keys, state, s, step)
        row_max_scaled, total, row_max = state[:3]
        scale = Scales.of(context, work).log2
        p_max = exp2_mufu(row_max * scale - row_max_scaled)
        counted = counted_p(cfg, state, scale, p_max) if const_expr(cfg.p_in_smem) else None
        p_in_o = Float32(0.0) if const_expr(cfg.drops_8bit_p) else p_max
        norm, lse = normalise(context, work, row, query, row_max_scaled, total, p_in_o, counted)
        if const_expr(cfg.drops_8bit_p):
            norm = norm * rounding_factor(cfg, p_max, state[3])
        if work.count > 0:
            norms.wait()
            if const_expr(cfg.has_dropout):
                norm = norm * context.args.mods.dropout.scale
            if const_expr(cfg.has_bytes):
                norm = norm * factor(context, work, "v_descale")
            norm_rows[thread] = norm
            norms.arrive()
            norms = norms.next()
        if is_written(cfg, work, row):
            lse_column = result(context, "lse", work)
            lse_column[row_coord_of(cfg, row), 0] = lse
        queue = queue.next()


def rounding_factor(cfg: Sm100ForwardConfig, p_max: Float32, kept: Float32) -> Float32:
    """Factor of O that cancels the rounding of the largest P that dropout kept. kept: sum of all that it kept. The sum
    of all P, by which `normalise` divides, would be no measure of it: their largest may have been dropped."""
    p = rounded(p_max, cfg.v_dtype)
    factor = kept * cute.arch.rcp_approx(kept + (p - p_max))
    return Float32(cutlass.select_(p > 0.0, factor, Float32(1.0)))  # O is 0 if all P are rounded to 0


def softmax_step(
    context: Sm100ForwardContext,
    ends: Ends,
    tile: Int32,
    cursor: Cursor,
    state: tuple[Float32, ...],
    block: RowInBlock,
    is_masked: bool,
):
    """Process one key block: S -> P. Returns the new state of the row: (row_max_scaled, total, row_max); with
    `drops_8bit_p` also the sum of the P that dropout kept, and row_max is of those.

    row_max_scaled: subtracted in the exponent, in log2 units. It is the row max so far, less `cfg.largest_p`, and the
    row max may exceed it by `rescale_threshold`; -inf while no key is unmasked. total: sum of P at that offset.
    row_max: largest score. is_masked: the band may mask columns of this block.
    """
    cfg, spans = context.cfg, context.tmem
    row_max_scaled, total, row_max = state[:3]
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    buffer = cursor.stage
    s_address = tmem.lane_address(spans.S, warp) + buffer * cfg.tile_n
    p_address = tmem.lane_address(spans.P, warp) + buffer * cfg.tile_n

    cursor.wait()
    if cfg.loads_maximum and not is_masked:
        s, block_max = load_scores_and_maximum(s_address, cfg.tile_n)
    else:
        s = load_scores(s_address, cfg.tile_n)  # each register is interlocked
        s = block.visible_scores(cfg, s, is_masked)
        block_max = row_maximum(s)
    row_max_scaled, factor = offset_and_factor(cfg, row_max_scaled, block_max * block.scales.log2)
    factor_stages = produce(ends.softmax_correction_scale, Lane(tile, cfg.q_tiles))
    factors = cursor.at_iteration_of(factor_stages)
    if cfg.s_stages > 1:
        factors.wait()
        thread = cursor.stage * cfg.tile_m + thread
    rows_in_smem(context, "scale")[thread] = factor
    factors.arrive()

    minus_offset = -finite_offset(cfg, row_max_scaled, is_masked)
    # The compiler reorders code freely between loops. It would compute nearly all exponentials before the P head
    # arrives, and the row sum among them. A barrier wait is a loop, so the two waits below keep three sections apart.
    p_pairs, kept_pairs, bits, packed = [], [], cfg.v_dtype.width, Packed(cfg.v_dtype)
    for pair in range(cfg.tile_n // 2):
        p, kept = block.weights(s, pair, minus_offset, cfg.polynomial)
        p_pairs.append(p)
        kept_pairs.append(kept)
        packed.add(*kept)
        stored = 2 * pair + 2
        if stored == STORE_KEYS:
            tmem.wait_loads()  # P overwrites S
        if stored % STORE_KEYS == 0 or stored == cfg.p_head:
            tmem.store(p_address + stored * bits // 32 - len(packed.words), packed.words)
            packed = Packed(cfg.v_dtype)
        if stored == cfg.p_head:
            tmem.wait_stores()
            cursor.arrive()
            cursor.wait()  # the phase of this S is complete, so this returns at once; the next S follows the P tail
    tmem.wait_stores()
    ends.softmax_mma_Ptail.arrive_full(buffer)
    if cfg.s_stages == 1:
        factors.next().wait()
    sums = packed_sum(p_pairs)  # of this block first: each addition rounds less than an addition to the total
    total = total * factor + (sums[0] + sums[1])
    if not cfg.drops_8bit_p:
        return row_max_scaled, total, cute.arch.fmax(row_max, block_max)
    sums = packed_sum(kept_pairs)
    row_max = cute.arch.fmax(row_max, block.largest_kept(s))
    return row_max_scaled, total, row_max, state[3] * factor + (sums[0] + sums[1])
