"""MMA role, one warp, one elected thread: issues every product; of a pair of CTAs, the leader's does for both.

Per work tile: S0 = Q0 K, S1 = Q1 K of the last key block; then per block and Q tile: O += P V, and S = Q K of the
block before. The matrix unit works in order, so S may be overwritten as soon as the product that reads P (which lies
over S) has been issued.

Waits:   load_mma_Q.full, load_mma_KV.full, mma_softmax_S.free, softmax_mma_Ptail.full
Signals: mma_softmax_S.full, mma_correction_O.full, mma_load_Q.full, load_mma_KV.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...core.constant import Constant
from ...pipeline.channels import LEADER, Ring
from .. import tmem
from ..mma import K_PER_MMA, Umma
from .config import P_HEAD, Q_TILES, TILE_N
from .work import Queue


@cute.jit
def mma(context):
    if context.args.order.rank == LEADER:
        issue(context)


@cute.jit
def issue(context):
    cfg = context.cfg
    ends = context.ends("mma")
    qk, pv = cfg.qk, cfg.pv
    spans = Spans(context)
    q_address, kv_address = context.smem.address("Q"), context.smem.address("KV")
    q_places = [qk.a.at(q_address + tile * cfg.q_tile.nbytes) for tile in range(Q_TILES)]
    kv = Ring.consumer(ends.load_mma_KV.channel)
    q_phase, s_phase = Int32(0), Int32(0)

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            k = qk.b.at(kv_address + kv.index * cfg.kv_stage_bytes)
            for tile in cutlass.range_constexpr(Q_TILES):
                ends.load_mma_Q.wait_full(tile, q_phase)
                if cutlass.const_expr(tile == 0):
                    ends.load_mma_KV.wait_full(kv.index, kv.phase)
                with cute.arch.elect_one():
                    qk.issue(spans.S[tile], q_places[tile], k, False)
                    ends.mma_softmax_S.commit_full(tile)
            with cute.arch.elect_one():
                ends.load_mma_KV.commit_free(kv.index)
            q_phase = q_phase ^ 1
            kv = kv.next()

            for i in cutlass.range(work.count - 1, unroll=1):
                ends.load_mma_KV.wait_full(kv.index, kv.phase)
                v = pv.b.at(kv_address + kv.index * cfg.kv_stage_bytes)
                v_stage = kv.index
                kv = kv.next()
                k = qk.b.at(kv_address + kv.index * cfg.kv_stage_bytes)
                for tile in cutlass.range_constexpr(Q_TILES):
                    issue_pv(pv, spans, ends, tile, v, i > 0, s_phase)
                    if cutlass.const_expr(tile == 0):
                        ends.load_mma_KV.wait_full(kv.index, kv.phase)
                    with cute.arch.elect_one():
                        if cutlass.const_expr(tile == Q_TILES - 1):
                            ends.load_mma_KV.commit_free(v_stage)
                        qk.issue(spans.S[tile], q_places[tile], k, False)
                        ends.mma_softmax_S.commit_full(tile)
                        if cutlass.const_expr(tile == Q_TILES - 1):
                            ends.load_mma_KV.commit_free(kv.index)
                kv = kv.next()
                s_phase = s_phase ^ 1

            if cutlass.const_expr(not cfg.o_over_q):
                with cute.arch.elect_one():
                    ends.mma_load_Q.commit_full(0)
            ends.load_mma_KV.wait_full(kv.index, kv.phase)
            v = pv.b.at(kv_address + kv.index * cfg.kv_stage_bytes)
            for tile in cutlass.range_constexpr(Q_TILES):
                issue_pv(pv, spans, ends, tile, v, work.count > 1, s_phase)
                with cute.arch.elect_one():
                    if cutlass.const_expr(tile == Q_TILES - 1):
                        ends.load_mma_KV.commit_free(kv.index)
                    ends.mma_correction_O.commit_full(tile)
            kv = kv.next()
            s_phase = s_phase ^ 1
        queue = queue.next()


class Spans(Constant):
    """Tensor-memory addresses of S, P and O, by Q tile, counted from `tmem.base`."""

    def __init__(self, context):
        base, spans = tmem.base(context.smem.pointer("tmem", Int32)), context.tmem
        by_tile = [[base + first + tile * TILE_N for tile in range(Q_TILES)] for first in (spans.S, spans.P, spans.O)]
        self.S, self.P, self.O = by_tile


def issue_pv(pv: Umma, spans: Spans, ends, tile: int, v, accumulate: Boolean, phase: Int32):
    """O += P V for one Q tile, P's head as soon as it is there."""
    head = P_HEAD // K_PER_MMA
    o, p = spans.O[tile], spans.P[tile]
    ends.mma_softmax_S.wait_free(tile, phase)
    with cute.arch.elect_one():
        pv.issue(o, p, v, accumulate, range(head))
    ends.softmax_mma_Ptail.wait_full(tile, phase)
    with cute.arch.elect_one():
        pv.issue(o, p, v, True, range(head, pv.steps))
