"""dK role, one warpgroup: dS of each step from the other one's P; dK of all steps; some columns of each step's dQ.

Waits:   load_compute_{K,V,Q,dO}.full, dV_dK_P.full, dK_compute_dS.{free,full}
Signals: dV_dK_P.free, load_compute_{Q,dO}.free, dK_compute_dS.{full,free}
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....pipeline.cursor import consume, produce
from ...wgmma import wait
from ..epilogue import store_gradient
from ..pointwise import Statistic, fill, query_of, rounded, rows_of, store_ds
from ..work import work_tile
from . import steps
from .config import WEIGHT_EXPONENT
from .handing import factors_by_sign, handed_over, send_ds
from .steps import Cursors, all_steps, finish_step


@cute.jit
def dk(context):
    work, side = work_tile(context), Side(context)
    side.total.fill(0.0)
    if work.blocks > 0:
        consume(side.ends.load_compute_K).wait()
        side.share.wait_for_keys()
        consume(side.ends.load_compute_V).wait()
        cute.arch.griddepcontrol_wait()  # the sums of dQ are cleared by another kernel
        all_steps(context, side, work, consume(side.ends.dV_dK_P))
    store_gradient(context, work, "K", "dk", side.total, context.args.scale, 1)


class Side(steps.Side):
    """Works with V, dO and Q."""

    compares = False

    def __init__(self, context):
        cfg, place = context.cfg, context.smem.pointer
        self.v, self.do = cfg.dp.a_at(place("V", cfg.dtype)), cfg.dp.b_at(place("dO", cfg.dtype))
        self.q_columns = cfg.dk.b_at(place("Q", cfg.dtype))
        super().__init__(context, "dK", step, 1, cfg.dk)

    def let_go(self, at: Cursors) -> None:
        cute.arch.sync_warp()  # as in `dv`
        at.q.arrive()


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
    """One block of queries, at a `place` (query head, query block), for which P says what a mask hides and what is
    dropped."""
    cfg, args, ends = context.cfg, context.args, side.ends
    dp = cfg.dp.accumulator()
    at.do.wait()
    cfg.dp.issue(dp, side.v[None, None, None, 0], side.do[None, None, None, at.do.stage], False)
    at.q.wait()
    minus_delta = Statistic(rows_of(context, at.q.stage) + cfg.tile_m, cfg)
    ds = at.p.in_step(produce(ends.dK_compute_dSother if cfg.ctas == 2 else ends.dK_compute_dS))
    at.p.wait()
    p = handed_over(context, at.p.stage, cute.size(dp))
    ds.wait()
    wait(0)
    shrink = Float32(2.0**-WEIGHT_EXPONENT)  # as the statistics are: P is so much larger
    if cutlass.const_expr(cfg.has_dropout):
        factors = factors_by_sign(p, args.mods.dropout.scale * shrink)
        p = [cute.arch.fmax(x, -x) for x in p]
    else:
        factors = [shrink] * len(p)
    words = rounded([x * (dp[i] * factors[i] + minus_delta[query_of(i)]) for i, x in enumerate(p)], cfg.dtype)
    at.do.arrive()
    at.p.arrive()
    store_ds(context, ds.stage, 0, words)
    ds_operand = cfg.dk.a_registers()
    fill(ds_operand, words)
    cfg.dk.issue(side.total, ds_operand, side.q_columns[None, None, None, at.q.stage], True)
    at.p.in_step(produce(ends.dK_compute_dS)).arrive()
    if cutlass.const_expr(cfg.ctas == 2):
        send_ds(context, ds)
    finish_step(context, side, work, at, has_dq)
