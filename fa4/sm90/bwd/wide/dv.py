"""dV role, one warpgroup: P of each step, handed to the other one; dV of all steps; some columns of each step's dQ. P
is 2^WEIGHT_EXPONENT times as large here, by the statistics of rows, until dV is stored.

Waits:   load_compute_{K,Q,dO}.full, dV_dK_P.free, dK_compute_dS.full
Signals: dV_dK_P.full, load_compute_{Q,dO}.free, dK_compute_dS.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....pipeline.cursor import consume, produce
from ...wgmma import wait
from ..epilogue import store_gradient
from ..pointwise import At, Statistic, fill, kept_at, rounded, rows_of, seen_by_key, sloped, weights
from ..work import work_tile
from . import steps
from .config import WEIGHT_EXPONENT
from .handing import hand_over
from .steps import Cursors, all_steps, finish_step


@cute.jit
def dv(context):
    work, side = work_tile(context), Side(context)
    side.total.fill(0.0)
    if work.blocks > 0:
        consume(side.ends.load_compute_K).wait()
        side.share.wait_for_keys()
        cute.arch.griddepcontrol_wait()  # the sums of dQ are cleared by another kernel
        all_steps(context, side, work, produce(side.ends.dV_dK_P))
    scale = Float32(2.0**-WEIGHT_EXPONENT)
    if cutlass.const_expr(context.cfg.has_dropout):
        scale = scale * context.args.mods.dropout.scale
    store_gradient(context, work, "V", "dv", side.total, scale, 0)


class Side(steps.Side):
    """Works with K, Q and dO."""

    compares = True

    def __init__(self, context):
        cfg, place = context.cfg, context.smem.pointer
        self.k, self.q = cfg.scores.a_at(place("K", cfg.dtype)), cfg.scores.b_at(place("Q", cfg.dtype))
        self.do_columns = cfg.dv.b_at(place("dO", cfg.dtype))
        super().__init__(context, "dV", step, 0, cfg.dv)

    def let_go(self, at: Cursors) -> None:
        at.do.arrive()


@cute.jit
def step(
    context,
    side: cutlass.Constexpr[Side],
    work,
    place: tuple[Int32, Int32],
    at: Cursors,
    is_cut: cutlass.Constexpr[bool],
    has_dq: cutlass.Constexpr[bool],
):
    """One block of queries, at a `place` (query head, query block)."""
    cfg, (head, m_block) = context.cfg, place
    s = cfg.scores.accumulator()
    at.q.wait()
    cfg.scores.issue(s, side.k[None, None, None, 0], side.q[None, None, None, at.q.stage], False)
    scores_at = At(seen_by_key(work, m_block) if cutlass.const_expr(is_cut) else None)
    kept = kept_at(context, work, head, m_block)
    at.p.wait()
    wait(0)
    p = weights(context, s, Statistic(rows_of(context, at.q.stage), cfg), scores_at)
    handed = sloped(context, s, p, scores_at)
    if cutlass.const_expr(kept is not None):
        handed, p = kept.by_sign(handed), kept.only(p)
    hand_over(context, at.p.stage, handed)
    at.p.arrive()
    p_operand = cfg.dv.a_registers()
    fill(p_operand, rounded(p, cfg.dtype))
    at.do.wait()
    cfg.dv.issue(side.total, p_operand, side.do_columns[None, None, None, at.do.stage], True)
    cute.arch.sync_warp()  # every lane has read the statistics that came with Q, when one of them says so
    at.q.arrive()
    finish_step(context, side, work, at, has_dq)
