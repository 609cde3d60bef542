"""Softmax role, one warpgroup: turns S into P, rescales O, and stores O and the log-sum-exp.

A row has two threads, with half of the keys of a block and half of the columns of each part of O. They exchange row
maxima in each block, and row sums at the end.

Beside 8-bit rows it first scales bfloat16 queries.

Waits:   mma_softmax_S.full, softmax_mma_P.free; load_softmax_Q.full
Signals: softmax_mma_P.full; softmax_mma_Q.full
"""

from __future__ import annotations

import functools
from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ....core.vec_io import pack_half, store_vec
from ....fwd.device.rows import is_written, normalise, query_of, result, row_coord_of
from ....fwd.device.scales import Scales
from ....fwd.device.work import Work
from ....pipeline.cursor import Cursor, consume, produce
from ....pipeline.row_chunks import store_row
from ... import tmem
from ...exp2 import exp2_mufu
from ...stages import column_parts
from ..correction import COLUMNS, normalised, rescale_if_any
from ..row_softmax import (
    LOAD_COLUMNS,
    RowInBlock,
    RowKeys,
    finite_offset,
    offset_and_factor,
    over_blocks,
    packed_sum,
    row_maximum,
)
from .config import S_STAGES
from .context import WidestContext
from .queries import half_of_warp, of_other_half, row_of_thread, scale_q
from .work import first_row, work_of_pair


@cute.jit
def softmax(context: WidestContext):
    cfg, ends = context.cfg, context.ends("softmax")
    work = work_of_pair(context)
    row = first_row(context, work) + row_of_thread()
    query = query_of(cfg, row)
    p = produce(ends.softmax_mma_P)
    state = -Float32.inf, Float32(0.0), -Float32.inf, p
    scales = Scales.of(context, work)
    if work.count > 0:
        if const_expr(cfg.scales_q):
            scales = scales.of_row(cfg, scale_q(context, ends))
        row_keys = RowKeys.of(context, work, row, query, half_of_warp() * cfg.keys, cfg.keys)
        row_keys = replace(row_keys, scales=scales)
        step = functools.partial(softmax_step, context)
        state, _ = over_blocks(context, work, row_keys, state, consume(ends.mma_softmax_S), step)
    row_max_scaled, total, row_max, p = state
    total = total + of_other_half(context, Int32(S_STAGES), total)
    p_max = exp2_mufu(row_max * scales.log2 - row_max_scaled)
    norm, lse = normalise(context, work, row, query, row_max_scaled, total, p_max)
    if const_expr(cfg.has_dropout):
        norm = norm * context.args.mods.dropout.scale
    if const_expr(cfg.converts_kv):
        norm = norm * scales.v_descale
    if is_written(cfg, work, row) & (half_of_warp() == 0):
        result(context, "lse", work)[row_coord_of(cfg, row), 0] = lse
    if work.count > 0:
        p.wait()  # the last product is done
        out_to_global(context, work, row, norm)
    elif const_expr(not cfg.split):  # combine ignores parts without keys
        zeros_to_global(context, work, row)


def softmax_step(
    context: WidestContext,
    scores: Cursor,
    state: tuple[Float32, Float32, Float32, Cursor],
    block: RowInBlock,
    is_masked: bool,
):
    """Process one key block: S -> P. state: see `fwd.softmax.softmax_step`, and the position of P."""
    cfg, spans = context.cfg, context.tmem
    row_max_scaled, total, row_max, p_cursor = state
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    scores.wait()
    address = tmem.lane_address(spans.S, warp) + scores.stage * cfg.keys
    s = []
    for column in range(0, cfg.keys, LOAD_COLUMNS):
        s += tmem.load(address + column, LOAD_COLUMNS)
    s = block.visible_scores(cfg, s, is_masked)
    block_max = row_maximum(s)
    block_max = cute.arch.fmax(block_max, of_other_half(context, scores.stage, block_max))
    before = row_max_scaled
    row_max_scaled, factor = offset_and_factor(cfg, row_max_scaled, block_max * block.scales.log2)
    minus_offset = -finite_offset(cfg, row_max_scaled, is_masked)
    packed, pairs = [], []
    for pair in range(cfg.keys // 2):
        p, kept = block.weights(s, pair, minus_offset, 0)
        pairs.append(p)
        packed.append(pack_half(kept[0], kept[1], cfg.v_dtype))
    p_cursor.wait()  # O has the product with the P before
    # Without a visible key before this block, O is 0, or not written yet.
    rescale_if_any(context, 0, factor, (factor < 1.0) & (before != -Float32.inf), cfg.o_columns)
    store_p(context, packed)
    tmem.wait_loads()  # the next S but one overwrites this one
    p_cursor.arrive()
    sums = packed_sum(pairs)
    total = total * factor + (sums[0] + sums[1])
    return row_max_scaled, total, cute.arch.fmax(row_max, block_max), p_cursor.next()


def store_p(context: WidestContext, packed: list[Int32]) -> None:
    """Write this thread's P to shared memory."""
    cfg = context.cfg
    panels = cfg.keys // cfg.p_tile.panel_columns
    address = context.smem.address("P") + half_of_warp() * (panels * cfg.p_tile.panel_bytes)
    store_row(address, cfg.p_tile, row_of_thread(), 0, packed)


@cute.jit
def out_to_global(context: WidestContext, work: Work, row: Int32, norm: Float32):
    """Write normalised O."""
    cfg = context.cfg
    out = result(context, "out", work)
    start = out.iterator + cute.crd2idx((row_coord_of(cfg, row), 0), out.layout)
    columns_per_reg = 1 if const_expr(cfg.split) else 2
    lane_column = 0
    parts = column_parts(cfg.head_dim_v)
    for part in cutlass.range_constexpr(len(parts)):
        half = parts[part] // 2
        first = 2 * lane_column + half_of_warp() * half  # column of O
        for column in cutlass.range_constexpr(0, half, COLUMNS):
            packed = normalised(context, 0, lane_column + column, norm)  # whole warp
            if is_written(cfg, work, row):
                for i in cutlass.range_constexpr(0, len(packed), 4):
                    at = first + (column + i * columns_per_reg)
                    if at < cfg.head_dim_v:
                        store_vec(start + at, packed[i : i + 4])
        lane_column += half
    tmem.wait_loads()


@cute.jit
def zeros_to_global(context: WidestContext, work: Work, row: Int32):
    """Write zeros: O of rows that see no key."""
    cfg = context.cfg
    if is_written(cfg, work, row):
        out = result(context, "out", work)
        start = out.iterator + cute.crd2idx((row_coord_of(cfg, row), 0), out.layout)
        half = -(-cfg.head_dim_v // 16) * 8
        for column in cutlass.range_constexpr(0, half, 8):
            at = half_of_warp() * half + column
            if at < cfg.head_dim_v:
                store_vec(start + at, [Int32(0)] * 4)
