"""Load role, one warp: loads Q, K and V from global to shared memory by TMA. Each CTA of a pair loads half of K's rows
and half of V's columns.

Waits:   load_mma_Q.free, load_mma_KV.free (for 8-bit K and V load_convert_KV.free)
Signals: load_mma_Q.full, load_mma_KV.full (for 8-bit K and V load_convert_KV.full), in the order in which the products
         consume the tiles: Q0 K Q1 V, then K V per block. If S is ahead: Q0 K Q1, then K of a block and V of the
         previous one.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8, const_expr

from ...core.rows import Rows, clamp_tile
from ...core.sequence import sequence_matrix
from ...fwd.device.work import Work
from ...fwd.variant import KvLoad
from ...pipeline.cursor import ALL, Cursor, produce
from ...pipeline.ends import Ends
from ...pipeline.tma import tma_load
from .block_scales import load_scales_of_keys, load_scales_of_q
from .context import Sm100ForwardContext
from .work import Queue, key_block, row_tile


@cute.jit
def load(context: Sm100ForwardContext):
    ends = context.ends("load")
    q = produce(ends.load_mma_Q, ALL)
    if const_expr(context.cfg.kv_load is not KvLoad.TMA):
        load_q_only(context, ends, q)
    else:
        kv = produce(ends.load_convert_KV if const_expr(context.cfg.converts_kv) else ends.load_mma_KV)
        load_qkv(context, ends, q, kv)


@cute.jit
def load_q_only(context: Sm100ForwardContext, ends: Ends, q: Cursor):
    """Load Q; the role gather or convert loads K and V."""
    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            for tile in cutlass.range_constexpr(context.cfg.q_tiles):
                load_q(context, work, tile, q)
            q = q.next()
        queue = queue.next()


@cute.jit
def load_qkv(context: Sm100ForwardContext, ends: Ends, q: Cursor, kv: Cursor):
    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            if const_expr(not context.cfg.s_ahead):
                for i in cutlass.range(work.count, unroll=1):
                    block = key_block(context, work, i)
                    if i == 0:
                        load_q(context, work, 0, q)
                    load_k(context, work, block, kv)
                    kv = kv.next()
                    if i == 0:
                        for tile in cutlass.range_constexpr(1, context.cfg.q_tiles):
                            load_q(context, work, tile, q)
                    load_v(context, work, block, kv)
                    kv = kv.next()
            else:  # K of a block, then V of the previous block
                load_q(context, work, 0, q)
                for i in cutlass.range(work.count, unroll=1):
                    load_k(context, work, key_block(context, work, i), kv)
                    kv = kv.next()
                    if i == 0:
                        for tile in cutlass.range_constexpr(1, context.cfg.q_tiles):
                            load_q(context, work, tile, q)
                    if i > 0:
                        load_v(context, work, key_block(context, work, i - 1), kv)
                        kv = kv.next()
                load_v(context, work, key_block(context, work, work.count - 1), kv)
                kv = kv.next()
            q = q.next()
        queue = queue.next()
    # All loads are consumed before the CTA ends: correction waits for the products that read them.


def load_q(context: Sm100ForwardContext, work: Work, tile: int, cursor: Cursor):
    """Load this CTA's rows of a Q tile."""
    cfg, tma = context.cfg, context.tma("q")
    cursor.wait(tile)
    q = sequence_matrix(tma.tensor, work.head, work.batch, work.query_rows, cfg.varlen, cfg.seq_bounded_q)
    smem_ptr = context.smem.pointer("Q", cfg.loaded_dtype) + tile * cfg.elements(cfg.q_tile.nbytes)
    cursor.expect_tx(tma.tile.nbytes + cfg.scale_bytes, context.args.order.rank, tile)
    if cfg.has_block_scales:
        load_scales_of_q(context, work, tile, cursor)
    tile_index = row_tile(context, work, tile)
    if cfg.seq_bounded_q:
        tile_index = clamp_tile(tile_index, work.query_rows, tma.tile.rows // cfg.rows_per_query)
    tma_load(tma, q, tile_index, smem_ptr, cursor.barrier(tile))


def load_k(context: Sm100ForwardContext, work: Work, block: Int32, kv: Cursor):
    """Load this CTA's keys of a block."""
    cfg, tma, rank = context.cfg, context.tma("k"), context.args.order.rank
    pieces = work.keys.pieces_of(tma.tensor, work.head_kv, block, cfg.tile_n, cfg.pieces, cfg.seq_bounded_k)
    kv.wait()
    kv.expect_tx(tma.tile.nbytes + cfg.scale_bytes, rank)
    if cfg.has_block_scales:
        load_scales_of_keys(context, context.args.cache.k_scales, cfg.scale_bytes, work, block, kv)
    if cfg.ctas == 2 and cfg.seq_bounded_k:
        rank = clamp_tile(rank, Rows(Int32(0), work.k.count - block * cfg.tile_n), tma.tile.rows)
    for i, (k, index) in enumerate(pieces):
        tma_load(tma, k, index * cfg.ctas + rank, kv_ptr(context, kv.stage), kv.barrier(), i)


def load_v(context: Sm100ForwardContext, work: Work, block: Int32, kv: Cursor):
    """Load this CTA's columns of V of a block."""
    cfg, tma, rank = context.cfg, context.tma("v"), context.args.order.rank
    pieces = work.keys.pieces_of(tma.tensor, work.head_kv, block, cfg.tile_n, cfg.pieces, cfg.seq_bounded_k)
    kv.wait()
    kv.expect_tx(tma.tile.nbytes + cfg.v_scale_bytes, rank)
    if cfg.has_block_scales:
        load_scales_of_keys(context, context.args.cache.v_scales, cfg.v_scale_bytes, work, block, kv)
    for i, (v, index) in enumerate(pieces):
        if cfg.ctas == 1:
            tma_load(tma, v, index, kv_ptr(context, kv.stage), kv.barrier(), i)
            continue
        for panel in range(tma.tile.panels):
            columns, in_tile = tma.tile.columns, panel * tma.tile.panel_columns
            first = rank * columns + in_tile
            if columns + in_tile >= cfg.head_dim_v:
                # A box must not lie wholly outside its tensor: load the last columns again.
                first = cutlass.min(first, cfg.head_dim_v - 8)
            to = kv_ptr(context, kv.stage) + panel * cfg.elements(tma.tile.panel_bytes)
            tma_load(tma, cute.domain_offset((0, first), v), index, to, kv.barrier(), i, slice(0, 1))


def kv_ptr(context: Sm100ForwardContext, stage: Int32) -> cute.Pointer:
    cfg = context.cfg
    if cfg.converts_kv:
        return context.smem.pointer("KV bytes", Uint8) + stage * cfg.kv8_stage_bytes
    return context.smem.pointer("KV", cfg.loaded_dtype) + stage * cfg.elements(cfg.kv_stage_bytes)
