"""MMA role, one warp, one elected thread: issues every product; the leader of a CTA pair issues for both CTAs.

Per step: dP, S of the next step, then D += dS B. For dV: S of the next step, then D += P B. So the exponentials of a
step overlap D of the step before, and dS overlaps S of the next step. The matrix unit works in order: dP may overwrite
dS, and S may overwrite P, when the product that reads it has been issued.

Waits:   load_mma_*.full, compute_mma_weights.full, mma_compute_S.free
Signals: mma_compute_{S,dP,D}.full, load_mma_{rightS,rightdP,rightD}.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ....pipeline.cursor import Cursor, consume, produce
from ....pipeline.ends import LEADER, Ends
from ... import tmem
from ..mma import issue_by_halves
from .context import Sm100WideContext
from .work import work_tile


@cute.jit
def mma(context: Sm100WideContext):
    work = work_tile(context)
    if (work.steps > 0) & (work.rank == LEADER):
        issue(context, context.ends("mma"), work.steps)


@cute.jit
def issue(context: Sm100WideContext, ends: Ends, steps: Int32):
    cfg, spans, smem = context.cfg, context.tmem, context.smem
    base = tmem.base(smem)
    scores, operands, columns = (
        produce(ends.mma_compute_S), consume(ends.load_mma_rightS), consume(ends.load_mma_rightD)
    )  # fmt: skip
    weights = consume(ends.compute_mma_weights)
    if const_expr(cfg.gradient.needs_dp):
        dp_operands = consume(ends.load_mma_rightdP)
    consume(ends.load_mma_leftS).wait()
    operands.wait()
    issue_scores(context, base, scores, operands)
    scores, operands = scores.next(), operands.next()
    if const_expr(cfg.gradient.needs_dp):
        consume(ends.load_mma_leftdP).wait()
    for i in cutlass.range(steps, unroll=1):
        if const_expr(cfg.gradient.needs_dp):
            dp_operands.wait()
            with cute.arch.elect_one():
                a, b = smem.address("leftdP"), smem.address("rightdP")
                cfg.dp.issue(base + spans.dP, cfg.dp.a.at(a), cfg.dp.b.at(b), False)
                ends.mma_compute_dP.commit_full(0)
                dp_operands.commit()
            dp_operands = dp_operands.next()
        if i + 1 < steps:
            operands.wait()
            if const_expr(cfg.gradient.needs_dp):
                scores.wait()
            issue_scores(context, base, scores, operands)
        scores, operands = scores.next(), operands.next()
        weights.wait()
        columns.wait()
        with cute.arch.elect_one():
            left = base + spans.dS if const_expr(cfg.gradient.needs_dp) else base + spans.P + weights.stage * cfg.tile_m
            b = smem.address("rightD") + columns.stage * cfg.columns_tile.nbytes
            issue_by_halves(cfg, cfg.grad, base + spans.D, left, cfg.grad.b.at(b), i > 0)
            columns.commit()
        weights, columns = weights.next(), columns.next()
    with cute.arch.elect_one():
        ends.mma_compute_D.commit_full(0)


def issue_scores(context: Sm100WideContext, base: Int32, scores: Cursor, operands: Cursor) -> None:
    """Issue S of a step, and free its right operand."""
    cfg, smem = context.cfg, context.smem
    b = smem.address("rightS") + operands.stage * cfg.tile(cfg.gradient.value[1][0]).nbytes
    with cute.arch.elect_one():
        d = base + context.tmem.S + scores.stage * cfg.tile_m
        cfg.scores.issue(d, cfg.scores.a.at(smem.address("leftS")), cfg.scores.b.at(b), False)
        scores.commit()
        operands.commit()
