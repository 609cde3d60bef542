"""Load role, one warp: brings Q, K and V from global to shared memory by TMA. A pair of CTAs shares every block of keys
and values: each loads half of K's rows and half of V's columns.

Waits:   mma_load_Q.full or epilogue_load_Q.full, load_mma_KV.free
Signals: load_mma_Q.full, load_mma_KV.full in the order the products consume them: Q0 K Q1 V, then K V per block.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...core.sequence import sequence_matrix
from ...pipeline.channels import Ring, announce
from ...pipeline.tma import tma_load, tma_load_panel
from .config import Q_TILES, TILE_N
from .work import Queue, row_tile


@cute.jit
def load(context):
    cfg, ends = context.cfg, context.ends("load")
    kv = Ring.producer(ends.load_mma_KV.channel)
    q_phase, tail_phase = Int32(1), Int32(0)

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            for i in cutlass.range(work.count, unroll=1):
                block = work.block(i)
                if i == 0:
                    load_q(context, ends, work, 0, q_phase)
                load_k(context, ends.load_mma_KV, work, block, kv)
                kv = kv.next()
                if i == 0:
                    for tile in cutlass.range_constexpr(1, Q_TILES):
                        load_q(context, ends, work, tile, q_phase)
                ends.load_mma_KV.wait_free(kv.index, kv.phase)
                ends_here = Boolean(work.k.count < (block + 1) * TILE_N)
                if cutlass.const_expr(cfg.scrubs_v):
                    if ends_here:
                        load_v_tail(context, ends, work, block, kv.index, tail_phase)
                        tail_phase = tail_phase ^ 1
                    else:
                        load_v(context, ends.load_mma_KV, work, block, kv.index)
                else:
                    load_v(context, ends.load_mma_KV, work, block, kv.index)
                kv = kv.next()
            q_phase = q_phase ^ 1
        queue = queue.next()
    # The last loads are all consumed before the CTA ends: correction waits for the products that read them.


def load_q(context, ends, work, tile: int, phase: Int32):
    """This CTA's rows of a Q tile."""
    cfg, tma, end = context.cfg, context.tma("q"), ends.load_mma_Q
    if cfg.o_over_q:
        ends.epilogue_load_Q.wait_full(tile, phase)
    elif tile == 0:
        ends.mma_load_Q.wait_full(0, phase)
    q = sequence_matrix(tma.tensor, work.head, work.batch, work.q, cfg.varlen)
    place = context.smem.pointer("Q", cfg.dtype) + tile * (cfg.q_tile.nbytes // 2)
    announce(end, tile, tma.tile.nbytes, context.args.order.rank)
    tma_load(tma, q, row_tile(context, work, tile), place, end.full(tile))


def load_k(context, end, work, block: Int32, kv: Ring):
    """This CTA's keys of a block."""
    cfg, tma, rank = context.cfg, context.tma("k"), context.args.order.rank
    k = sequence_matrix(tma.tensor, work.head_kv, work.batch, work.k, cfg.varlen)
    end.wait_free(kv.index, kv.phase)
    announce(end, kv.index, tma.tile.nbytes, rank)
    tma_load(tma, k, block * cfg.ctas + rank, kv_place(context, kv.index), end.full(kv.index))


def load_v(context, end, work, block: Int32, stage: Int32):
    """This CTA's columns of a block."""
    cfg, tma, rank = context.cfg, context.tma("v"), context.args.order.rank
    v = sequence_matrix(tma.tensor, work.head_kv, work.batch, work.k, cfg.varlen)
    announce(end, stage, tma.tile.nbytes, rank)
    if cfg.ctas == 2:
        tma_load_panel(tma, v, block, rank, kv_place(context, stage), end.full(stage))
    else:
        tma_load(tma, v, block, kv_place(context, stage), end.full(stage))


def kv_place(context, stage: Int32) -> cute.Pointer:
    cfg = context.cfg
    return context.smem.pointer("KV", cfg.dtype) + stage * (cfg.kv_stage_bytes // 2)


@cute.jit
def load_v_tail(context, ends, work, block: Int32, stage: Int32, phase: Int32):
    """Load V's last block and overwrite the rows after the sequence's end with zeros."""
    cfg, tma, end = context.cfg, context.tma("v"), ends.load_load_Vtail
    tile, place = cfg.v_tile, kv_place(context, stage)
    v = sequence_matrix(tma.tensor, work.head_kv, work.batch, work.k, cfg.varlen)
    end.expect(0, tile.nbytes)
    tma_load(tma, v, block, place, end.full(0))
    end.wait_full(0, phase)
    words = cute.make_tensor(
        cute.recast_ptr(place, dtype=Int32),
        cute.make_layout((32, tile.rows, tile.panels), stride=(1, 32, tile.rows * 32)),
    )
    lane = cute.arch.lane_idx()  # a row of a panel is 128 bytes, one word a lane
    for row in cutlass.range(work.k.count - block * TILE_N, TILE_N, unroll=1):
        for panel in cutlass.range_constexpr(tile.panels):
            words[lane, row, panel] = Int32(0)
    ends.load_mma_KV.hand_over(stage)
