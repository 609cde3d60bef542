"""dV role, one warpgroup: P of each step, handed to the other one; dV of all steps; some columns of each step's dQ.

Waits:   load_compute_{K,Q,dO}.full, dV_dK_P.free, dK_compute_dS.full
Signals: dV_dK_P.full, load_compute_{Q,dO}.free, dK_compute_dS.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....core.score import Softcap
from ....pipeline.cursor import consume, produce
from ...wgmma import wait
from ..epilogue import store_gradient
from ..pointwise import At, Statistic, fill, rounded, rows_of, seen_by_key, weights
from ..work import work_tile
from .handing import Cursors, hand_over
from .share import Share


@cute.jit
def dv(context):
    cfg, ends = context.cfg, context.ends("dV")
    work = work_tile(context)
    total = cfg.dv.accumulator()
    total.fill(0.0)
    if work.blocks > 0:
        consume(ends.load_compute_K).wait()
    cute.arch.griddepcontrol_wait()  # the sums of dQ are cleared by another kernel
    operands = Operands(context)
    at = Cursors(consume(ends.load_compute_Q), consume(ends.load_compute_dO), produce(ends.dV_dK_P))
    for member in cutlass.range(cfg.group, unroll=1):
        head = work.head_kv * cfg.group + member
        for m_block in cutlass.range(work.first, work.full_first, unroll=1):
            step(context, operands, total, work, m_block, head, at, True)
            at = at.next()
        for m_block in cutlass.range(work.full_first, work.full_stop, unroll=1):
            step(context, operands, total, work, m_block, head, at, False)
            at = at.next()
        if cutlass.const_expr(cfg.has_left):
            for m_block in cutlass.range(work.full_stop, work.stop, unroll=1):
                step(context, operands, total, work, m_block, head, at, True)
                at = at.next()
    store_gradient(context, work, "V", "dv", total, Float32(1.0), 0)


class Operands:
    """Left and right operands of the products, made once."""

    def __init__(self, context):
        cfg, place = context.cfg, context.smem.pointer
        self.k, self.q = cfg.scores.a_at(place("K", cfg.dtype)), cfg.scores.b_at(place("Q", cfg.dtype))
        self.do_columns = cfg.dv.b_at(place("dO", cfg.dtype))
        self.share = Share(context, 0)


@cute.jit
def step(
    context,
    operands: cutlass.Constexpr[Operands],
    total: cute.Tensor,
    work,
    m_block: Int32,
    head: Int32,
    at: Cursors,
    is_cut: cutlass.Constexpr[bool],
):
    """One block of queries."""
    cfg, ends, args = context.cfg, context.ends("dV"), context.args
    s = cfg.scores.accumulator()
    at.q.wait()
    cfg.scores.issue(s, operands.k[None, None, None, 0], operands.q[None, None, None, at.q.stage], False)
    scores_at = At(seen_by_key(work, m_block) if cutlass.const_expr(is_cut) else None)
    at.p.wait()
    wait(0)
    p = weights(context, s, Statistic(rows_of(context, at.q.stage), cfg), scores_at)
    handed = p
    if cutlass.const_expr(cfg.has_softcap):
        # s holds what the softcap made of the scores.
        handed = [x * Softcap(args.scale_over_cap).slope(s[i]) for i, x in enumerate(p)]
    hand_over(context, at.p.stage, handed)
    at.p.arrive()
    p_operand = cfg.dv.a_registers()
    fill(p_operand, rounded(p, cfg.dtype))
    at.do.wait()
    cfg.dv.issue(total, p_operand, operands.do_columns[None, None, None, at.do.stage], True)
    at.q.arrive()
    ds = at.p.in_step(consume(ends.dK_compute_dS))
    ds.wait()
    dq = operands.share.start(ds)
    wait(1)
    at.do.arrive()
    wait(0)
    ds.arrive()
    operands.share.add(context, work, m_block, head, dq)
