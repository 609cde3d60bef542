"""MMA role, one warp, one elected thread of the leader: issues every product of both CTAs.

S of the next key block precedes O += P V of this one, so it is there when softmax is.

Waits:   load_mma_Q.full (or softmax_mma_Q.full), load_mma_KV.full (or convert_mma_KV.full), softmax_mma_P.full
Signals: mma_softmax_S.full, load_mma_KV.free (or convert_mma_KV.free), softmax_mma_P.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ....pipeline.cursor import Cursor, consume, produce
from ....pipeline.ends import LEADER, Ends
from ... import tmem
from ...stage_products import issue_by_panels, issue_by_rows
from .context import WidestContext
from .work import work_of_pair


@cute.jit
def mma(context: WidestContext):
    work = work_of_pair(context)
    if (work.count > 0) & (context.args.order.rank == LEADER):
        issue(context, context.ends("mma"), work.count)


@cute.jit
def issue(context: WidestContext, ends: cutlass.Constexpr[Ends], count: Int32):
    base = tmem.base(context.smem)
    kv = consume(ends.convert_mma_KV if const_expr(context.cfg.converts_kv) else ends.load_mma_KV)
    s, p = produce(ends.mma_softmax_S), consume(ends.softmax_mma_P)
    consume(ends.softmax_mma_Q if const_expr(context.cfg.scales_q) else ends.load_mma_Q).wait()
    kv = issue_s(context, base, kv, s)
    s = s.next()
    for i in cutlass.range(count, unroll=1):
        if i + 1 < count:
            kv = issue_s(context, base, kv, s)
        s = s.next()
        p.wait()
        kv = issue_o(context, base, kv, i > 0)
        with cute.arch.elect_one():
            p.commit()
        p = p.next()


def issue_s(context: WidestContext, base: Int32, kv: Cursor, s: Cursor) -> Cursor:
    """S = Q K of a key block. Returns the cursor after its K."""
    cfg, smem = context.cfg, context.smem
    d = base + context.tmem.S + s.stage * cfg.keys
    return issue_by_panels(
        cfg.v_dtype, d, cfg.q_tile, smem.address("Q"), cfg.k_tile, smem.address("KV"), kv, s.commit
    )  # fmt: skip


def issue_o(context: WidestContext, base: Int32, kv: Cursor, accumulate: Boolean) -> Cursor:
    """O += P V of a key block. Returns the cursor after its V."""
    cfg, smem = context.cfg, context.smem
    d, ring = base + context.tmem.O, smem.address("KV")
    return issue_by_rows(cfg.v_dtype, d, cfg.p_tile, smem.address("P"), cfg.head_dim_v, ring, kv, accumulate)
