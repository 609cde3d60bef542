"""MMA role, one warp, one elected thread: issues every product; of a pair of CTAs, the leader's does for both.

Per work tile: S0 = Q0 K, S1 = Q1 K of the last key block; then per block and Q tile: O += P V, and S = Q K of the
block before. The matrix unit works in order, so S may be overwritten as soon as the product that reads P (which lies
over S) has been issued.

Waits:   load_mma_Q.full, load_mma_KV.full (of 8-bit numbers convert_mma_KV.full), mma_softmax_S.free,
         softmax_mma_Ptail.full
Signals: mma_softmax_S.full, mma_correction_O.full, load_mma_Q.free, load_mma_KV.free (convert_mma_KV.free)
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean

from ...core.constant import Constant
from ...pipeline.cursor import ALL, Cursor, consume, produce
from ...pipeline.ends import LEADER, End, Ends
from .. import tmem
from ..mma import K_PER_MMA
from .config import Config
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
    q_places = [qk.a.at(q_address + tile * cfg.q_tile.nbytes) for tile in range(cfg.q_tiles)]
    q, kv = consume(ends.load_mma_Q, ALL), consume(keys_end(cfg, ends))
    # What S.free tells, that P's head is there and O may be added to, is waited for after S is committed and before the
    # S after it. So the first S of the kernel is not waited for.
    s = produce(ends.mma_softmax_S, ALL, ahead=1)
    ptail = consume(ends.softmax_mma_Ptail, ALL)

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            k = qk.b.at(kv_address + kv.stage * cfg.kv_stage_bytes)
            for tile in cutlass.range_constexpr(cfg.q_tiles):
                q.wait(tile)
                if cutlass.const_expr(tile == 0):
                    kv.wait()
                with cute.arch.elect_one():
                    qk.issue(spans.S[tile], q_places[tile], k, False)
                    s.commit(tile)
            with cute.arch.elect_one():
                kv.commit()
            kv = kv.next()

            for i in cutlass.range(work.count - 1, unroll=1):
                kv.wait()
                v = pv.b.at(kv_address + kv.stage * cfg.kv_stage_bytes)
                v_cursor = kv
                kv = kv.next()
                k = qk.b.at(kv_address + kv.stage * cfg.kv_stage_bytes)
                for tile in cutlass.range_constexpr(cfg.q_tiles):
                    issue_pv(cfg, spans, tile, v, i > 0, s, ptail)
                    if cutlass.const_expr(tile == 0):
                        kv.wait()
                    with cute.arch.elect_one():
                        if cutlass.const_expr(tile == cfg.q_tiles - 1):
                            v_cursor.commit()
                        qk.issue(spans.S[tile], q_places[tile], k, False)
                        s.commit(tile)
                        if cutlass.const_expr(tile == cfg.q_tiles - 1):
                            kv.commit()
                kv = kv.next()
                s = s.next()

            if cutlass.const_expr(not cfg.o_over_q):
                with cute.arch.elect_one():
                    for tile in cutlass.range_constexpr(cfg.q_tiles):
                        q.commit(tile)
            q = q.next()
            kv.wait()
            v = pv.b.at(kv_address + kv.stage * cfg.kv_stage_bytes)
            for tile in cutlass.range_constexpr(cfg.q_tiles):
                issue_pv(cfg, spans, tile, v, work.count > 1, s, ptail)
                with cute.arch.elect_one():
                    if cutlass.const_expr(tile == cfg.q_tiles - 1):
                        kv.commit()
                    ends.mma_correction_O.commit_full(tile)
            kv = kv.next()
            s = s.next()
        queue = queue.next()


def keys_end(cfg: Config, ends: Ends) -> End:
    """Where K and V come from."""
    if cfg.has_bytes:
        return ends.convert_mma_KV
    return ends.gather_mma_KV if cfg.plain_keys else ends.load_mma_KV


class Spans(Constant):
    """Tensor-memory addresses of S, P and O, by Q tile, counted from `tmem.base`."""

    def __init__(self, context):
        cfg, base, spans = context.cfg, tmem.base(context.smem), context.tmem
        steps = ((spans.S, cfg.tile_n), (spans.P, cfg.tile_n), (spans.O, cfg.o_columns))
        by_tile = [[base + first + tile * step for tile in range(cfg.q_tiles)] for first, step in steps]
        self.S, self.P, self.O = by_tile


def issue_pv(cfg: Config, spans: Spans, tile: int, v, accumulate: Boolean, s: Cursor, ptail: Cursor):
    """O += P V for one Q tile, P's head as soon as it is there."""
    pv, head = cfg.pv, cfg.p_head // K_PER_MMA
    o, p = spans.O[tile], spans.P[tile]
    s.wait(tile)
    with cute.arch.elect_one():
        pv.issue(o, p, v, accumulate, range(head))
    s.in_step(ptail).wait(tile)
    with cute.arch.elect_one():
        pv.issue(o, p, v, True, range(head, pv.steps))
