"""MMA role, one warp, one elected thread of the leader: issues every product of both CTAs, in the order of `wide`.

Waits:   load_mma_*.full, compute_mma_weights.full, mma_compute_S.free
Signals: mma_compute_{S,dP,D}.full, load_mma_right.free
"""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ....pipeline.cursor import Cursor, consume, produce
from ....pipeline.ends import LEADER, Ends
from ... import tmem
from ...stage_products import issue_by_panels, issue_by_rows
from ..wide.work import work_tile
from .context import Sm100WidestContext


@cute.jit
def mma(context: Sm100WidestContext):
    work = work_tile(context)
    if (work.steps > 0) & (work.rank == LEADER):
        issue(context, context.ends("mma"), work.steps)


@cute.jit
def issue(context: Sm100WidestContext, ends: cutlass.Constexpr[Ends], steps: Int32):
    cfg, spans, smem = context.cfg, context.tmem, context.smem
    (_, left_dp), (_, right_dp), _ = cfg.gradient.value
    base, ring = tmem.base(smem), smem.address("right")
    scores, operands, weights = (
        produce(ends.mma_compute_S), consume(ends.load_mma_right), consume(ends.compute_mma_weights)
    )  # fmt: skip
    consume(ends.load_mma_leftS).wait()
    operands = issue_scores(context, base, scores, operands)
    scores = scores.next()
    if const_expr(cfg.gradient.needs_dp):
        consume(ends.load_mma_leftdP).wait()
    for i in cutlass.range(steps, unroll=1):
        if const_expr(cfg.gradient.needs_dp):
            done = functools.partial(ends.mma_compute_dP.commit_full, 0)
            operands = issue_by_panels(
                cfg.dtype, base + spans.dP, cfg.tile(left_dp), smem.address("leftdP"), cfg.tile(right_dp), ring,
                operands, done,
            )  # fmt: skip
        if i + 1 < steps:
            if const_expr(cfg.gradient.needs_dp):
                scores.wait()
            operands = issue_scores(context, base, scores, operands)
        scores = scores.next()
        weights.wait()
        address = smem.address("weights") + weights.stage * cfg.weights_tile.nbytes
        operands = issue_by_rows(
            cfg.dtype, base + spans.D, cfg.weights_tile, address, cfg.operand_columns, ring, operands, i > 0
        )  # fmt: skip
        weights = weights.next()
    with cute.arch.elect_one():
        ends.mma_compute_D.commit_full(0)


def issue_scores(context: Sm100WidestContext, base: Int32, scores: Cursor, operands: Cursor) -> Cursor:
    """Issue S of a step. Returns the cursor after its right operand."""
    cfg, smem = context.cfg, context.smem
    (left, _), (right, _), _ = cfg.gradient.value
    d = base + context.tmem.S + scores.stage * cfg.lane_columns
    return issue_by_panels(
        cfg.dtype, d, cfg.tile(left), smem.address("leftS"), cfg.tile(right), smem.address("right"), operands,
        scores.commit,
    )  # fmt: skip
