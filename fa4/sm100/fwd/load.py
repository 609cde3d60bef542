"""Load role, one warp: brings Q, K and V from global to shared memory by TMA. A pair of CTAs shares every block of keys
and values: each loads half of K's rows and half of V's columns.

Waits:   mma_load_Q.full or epilogue_load_Q.full, load_mma_KV.free
Signals: load_mma_Q.full, load_mma_KV.full in the order the products consume them: Q0 K Q1 V, then K V per block.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..channels import LEADER, End, Ring
from ..copy import TmaTile, tma_load, tma_load_panel
from .config import Q_TILES, TILE_N
from .work import Queue, row_tile, sequence_matrix


@cute.jit
def load(context):
    cfg, args = context.cfg, context.args
    ends = context.ends("load")
    q_tma, k_tma, v_tma = context.tma("q"), context.tma("k"), context.tma("v")
    q_base, kv_base = context.smem.pointer("Q", cfg.dtype), context.smem.pointer("KV", cfg.dtype)
    q_step, kv_step = cfg.q_tile.nbytes // 2, cfg.kv_stage_bytes // 2
    kv = Ring.producer(ends.load_mma_KV.channel)
    q_phase, tail_phase = Int32(1), Int32(0)
    rank = args.scheduler.rank

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            q = sequence_matrix(q_tma.tensor, work.head, work.batch, work.q.first, cfg.varlen)
            k = sequence_matrix(k_tma.tensor, work.head_kv, work.batch, work.k.first, cfg.varlen)
            v = sequence_matrix(v_tma.tensor, work.head_kv, work.batch, work.k.first, cfg.varlen)
            for i in cutlass.range(work.count, unroll=1):
                block = work.block(i)
                if i == 0:
                    load_q(context, ends, q_tma, q, row_tile(context, work, 0), 0, q_base, q_phase)
                ends.load_mma_KV.wait_free(kv.index, kv.phase)
                announce(ends.load_mma_KV, kv.index, cfg.k_tile.nbytes, rank)
                k_place = kv_base + kv.index * kv_step
                tma_load(k_tma, k, block * cfg.ctas + rank, k_place, ends.load_mma_KV.full(kv.index))
                kv = kv.next()
                if i == 0:
                    for tile in cutlass.range_constexpr(1, Q_TILES):
                        place = q_base + tile * q_step
                        load_q(context, ends, q_tma, q, row_tile(context, work, tile), tile, place, q_phase)
                ends.load_mma_KV.wait_free(kv.index, kv.phase)
                place = kv_base + kv.index * kv_step
                rows = work.k.count - block * TILE_N
                if cutlass.const_expr(cfg.scrubs_v):
                    if rows < TILE_N:
                        load_v_tail(ends, v_tma, v, block, place, rows, tail_phase)
                        tail_phase = tail_phase ^ 1
                        ends.load_mma_KV.hand_over(kv.index)
                    else:
                        load_v(context, ends.load_mma_KV, v_tma, v, block, place, kv.index)
                else:
                    load_v(context, ends.load_mma_KV, v_tma, v, block, place, kv.index)
                kv = kv.next()
            q_phase = q_phase ^ 1
        queue = queue.next()
    # The last loads are all consumed before the CTA ends: correction waits for the products that read them.


@cute.jit
def announce(end, stage, nbytes: cutlass.Constexpr[int], rank: Int32):
    """Expect `nbytes` from each CTA; of a pair, the leader does."""
    if rank == LEADER:
        end.expect(stage, nbytes)


def load_q(context, ends, tma: TmaTile, q: cute.Tensor, row_tile, tile: int, place: cute.Pointer, phase):
    channel = ends.load_mma_Q
    if context.cfg.o_over_q:
        ends.epilogue_load_Q.wait_full(tile, phase)
    elif tile == 0:
        ends.mma_load_Q.wait_full(0, phase)
    announce(channel, tile, tma.tile.nbytes, context.args.scheduler.rank)
    tma_load(tma, q, row_tile, place, channel.full(tile))


def load_v(context, channel: End, tma: TmaTile, v: cute.Tensor, block, place: cute.Pointer, stage):
    rank = context.args.scheduler.rank
    announce(channel, stage, tma.tile.nbytes, rank)
    if context.cfg.ctas == 2:
        tma_load_panel(tma, v, block, rank, place, channel.full(stage))
    else:
        tma_load(tma, v, block, place, channel.full(stage))


@cute.jit
def load_v_tail(ends, tma: TmaTile, v: cute.Tensor, block, place: cute.Pointer, rows: Int32, phase: Int32):
    """Load V's last block and overwrite the rows after the sequence's end with zeros."""
    ends.load_load_Vtail.expect(0, tma.tile.nbytes)
    tma_load(tma, v, block, place, ends.load_load_Vtail.full(0))
    ends.load_load_Vtail.wait_full(0, phase)
    words = cute.make_tensor(
        cute.recast_ptr(place, dtype=Int32),
        cute.make_layout((32, tma.tile.rows, tma.tile.panels), stride=(1, 32, tma.tile.rows * 32)),
    )
    lane = cute.arch.lane_idx()  # a row of a panel is 128 bytes, one word a lane
    for row in cutlass.range(rows, TILE_N, unroll=1):
        for panel in cutlass.range_constexpr(tma.tile.panels):
            words[lane, row, panel] = Int32(0)
