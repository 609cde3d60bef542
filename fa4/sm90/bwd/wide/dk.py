"""dK role, one warpgroup: dS of each step from the other one's P; dK of all steps; some columns of each step's dQ.

Waits:   load_compute_{K,V,Q,dO}.full, dV_dK_P.full, dK_compute_dS.{free,full}
Signals: dV_dK_P.free, load_compute_{Q,dO}.free, dK_compute_dS.{full,free}
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ....pipeline.cursor import consume, produce
from ...wgmma import wait
from ..epilogue import store_gradient
from ..pointwise import Statistic, fill, query_of, rounded, rows_of, store_ds
from ..work import work_tile
from .handing import Cursors, handed_over
from .share import Share


@cute.jit
def dk(context):
    cfg, ends = context.cfg, context.ends("dK")
    work = work_tile(context)
    total = cfg.dk.accumulator()
    total.fill(0.0)
    if work.blocks > 0:
        consume(ends.load_compute_K).wait()
        consume(ends.load_compute_V).wait()
    cute.arch.griddepcontrol_wait()  # the sums of dQ are cleared by another kernel
    operands = Operands(context)
    at = Cursors(consume(ends.load_compute_Q), consume(ends.load_compute_dO), consume(ends.dV_dK_P))
    for member in cutlass.range(cfg.group, unroll=1):
        head = work.head_kv * cfg.group + member
        for m_block in cutlass.range(work.first, work.stop, unroll=1):
            step(context, operands, total, work, m_block, head, at)
            at = at.next()
    store_gradient(context, work, "K", "dk", total, context.args.scale, 1)


class Operands:
    """Left and right operands of the products, made once."""

    def __init__(self, context):
        cfg, place = context.cfg, context.smem.pointer
        self.v, self.do = cfg.dp.a_at(place("V", cfg.dtype)), cfg.dp.b_at(place("dO", cfg.dtype))
        self.q_columns = cfg.dk.b_at(place("Q", cfg.dtype))
        self.share = Share(context, 1)


@cute.jit
def step(
    context,
    operands: cutlass.Constexpr[Operands],
    total: cute.Tensor,
    work,
    m_block: Int32,
    head: Int32,
    at: Cursors,
):
    """One block of queries."""
    cfg, ends = context.cfg, context.ends("dK")
    dp = cfg.dp.accumulator()
    at.do.wait()
    cfg.dp.issue(dp, operands.v[None, None, None, 0], operands.do[None, None, None, at.do.stage], False)
    at.q.wait()
    minus_delta = Statistic(rows_of(context, at.q.stage) + cfg.tile_m, cfg)
    ds_full = at.p.in_step(consume(ends.dK_compute_dS))
    ds = at.p.in_step(produce(ends.dK_compute_dS))
    at.p.wait()
    p = handed_over(context, at.p.stage, cute.size(dp))
    ds.wait()
    wait(0)
    words = rounded([x * (dp[i] + minus_delta[query_of(i)]) for i, x in enumerate(p)], cfg.dtype)
    at.do.arrive()
    at.p.arrive()
    store_ds(context, ds.stage, 0, words)
    ds_operand = cfg.dk.a_registers()
    fill(ds_operand, words)
    cfg.dk.issue(total, ds_operand, operands.q_columns[None, None, None, at.q.stage], True)
    ds.arrive()
    if cutlass.const_expr(len(operands.share.panels) > 0):
        ds_full.wait()
        dq = operands.share.start(ds_full)
        wait(1)
        at.q.arrive()
        wait(0)
        ds_full.arrive()
        operands.share.add(context, work, m_block, head, dq)
    else:
        wait(0)
        at.q.arrive()
        ds_full.arrive()
