"""Loop over the steps of a block of keys. The two consumers need not run in lockstep.

Per step: S^T = K Q^T and dP^T = V dO^T; P^T = exp2(S^T - lse) during the dP^T product; dS^T = P^T (dP^T - delta),
stored to shared memory. Then dV += P^T dO; dQ of the step before, for which both consumers have stored dS; and dK +=
dS^T Q, during which dQ leaves the registers. So the products of one consumer can overlap with P and dS of the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ...bwd.device.work import first_member
from ...pipeline.cursor import consume, produce
from ..wgmma import ROWS
from .common.config import CONSUMERS
from .common.work import Sm90BackwardWork, WarpgroupSteps, in_direction, warpgroup_steps, whole_blocks
from .config import Division
from .consumer import BackwardConsumer, Cursors
from .context import Sm90BackwardContext
from .dq_cursor import DqCursor
from .epilogue import stage_gradients


def consumer_steps(work: Sm90BackwardWork, consumer: Int32, cfg) -> WarpgroupSteps:
    """Return the steps of a consumer."""
    if not cfg.trims:
        return warpgroup_steps(work)
    mask, block = replace(work.mask, tile_n=ROWS), work.n_block * CONSUMERS + consumer
    first, _ = mask.query_blocks(block)
    first = cutlass.min(cutlass.max(first, work.first), work.stop)
    return in_direction(work, WarpgroupSteps(first, *whole_blocks(mask, block, first, work.stop), work.stop))


class QueryHalves(NamedTuple):
    """Halves of the queries of steps in which some query sees a key of a consumer: those with first <= index < stop."""

    first: Int32
    stop: Int32

    @staticmethod
    def of(work: Sm90BackwardWork, consumer: Int32) -> QueryHalves:
        mask = replace(work.mask, tile_m=ROWS, tile_n=ROWS)
        blocks = mask.query_blocks(work.n_block * CONSUMERS + consumer)
        return QueryHalves(*(cute.arch.make_warp_uniform(x) for x in blocks))

    def are_both(self, step: Int32) -> Boolean:
        return Boolean((2 * step >= self.first) & (2 * step + 1 < self.stop))

    def only(self, step: Int32) -> Int32:
        """Index of the half of a step of which some query may see a key, if there is only one."""
        return Int32(cutlass.select_(2 * step < self.first, Int32(1), Int32(0)))


@cute.jit
def all_steps(context: Sm90BackwardContext, consumer: cutlass.Constexpr[BackwardConsumer], work: Sm90BackwardWork):
    """Run all steps of a block of keys (at least one)."""
    if const_expr(context.cfg.division is not Division.NONE):
        steps(context, consumer, work, True)
    else:
        if consumer.index == 0:
            steps(context, consumer, work, True)
        else:
            steps(context, consumer, work, False)


@cute.jit
def steps(
    context: Sm90BackwardContext,
    consumer: cutlass.Constexpr[BackwardConsumer],
    work: Sm90BackwardWork,
    has_dq: cutlass.Constexpr[bool],
):
    """Run the steps of a consumer. has_dq: it computes dQ or a share of it."""
    cfg, ends = context.cfg, consumer.ends
    q, do, ds = consume(ends.load_compute_Q), consume(ends.load_compute_dO), produce(ends.compute_compute_dS)
    last_dq = DqCursor.before_first(ends.compute_reduce_dQ, cfg)
    cursors = Cursors(q, do, ds, consume(ends.compute_compute_dS), last_dq)
    wg_steps, begin_member = consumer_steps(work, consumer.index, cfg), first_member(context, work)
    if const_expr(cfg.trims):
        if (wg_steps.first > work.first) | (wg_steps.stop == work.first):
            consumer.skip(cursors, False)
        else:
            consumer.step(work, (Int32(0), work.first), cursors, True, False, True)
    elif const_expr(cfg.has_blocks):
        first_work = work.of_head(context, begin_member)
        if first_work.full_first > first_work.first:
            consumer.step(first_work, (begin_member, first_work.first), cursors, True, False, True)
        else:
            consumer.step(first_work, (begin_member, first_work.first), cursors, False, False, True)
    else:
        consumer.step(work, (Int32(0), work.first), cursors, True, False, True)
    cursors = cursors.after_first()
    halves = QueryHalves.of(work, consumer.index) if const_expr(cfg.halves_steps) else None
    for member in cutlass.range(cfg.group, unroll=1):
        of_head, wg_of_head = work, wg_steps
        if const_expr(cfg.differs_by_head):
            of_head = work.of_head(context, member)
            wg_of_head = consumer_steps(of_head, consumer.index, cfg)
        first = of_head.first + cutlass.select_(member == begin_member, Int32(1), Int32(0))
        if const_expr(cfg.trims and cfg.group > 1):
            for _ in cutlass.range(first, wg_of_head.first, unroll=1):
                consumer.skip(cursors, has_dq)
                cursors = cursors.next()
            first = cutlass.max(first, wg_of_head.first)
        for half in cutlass.range(
            2 if const_expr(cfg.has_left or cfg.folds) else 1, unroll=1
        ):  # partial blocks may be last
            begin_partial, end_partial = wg_of_head.partial(half, first)
            for i in cutlass.range(begin_partial, end_partial, unroll=1):
                if const_expr(cfg.halves_steps):
                    if halves.are_both(i):
                        consumer.step(of_head, (member, i), cursors, True, has_dq, False)
                    else:
                        consumer.step(of_head, (member, i), cursors, True, has_dq, False, halves.only(i))
                else:
                    consumer.step(of_head, (member, i), cursors, True, has_dq, False)
                cursors = cursors.next()
            begin_full, end_full = wg_of_head.full(half, first, of_head.first)
            for i in cutlass.range(begin_full, end_full, unroll=1):
                consumer.step(of_head, (member, i), cursors, False, has_dq, False)
                cursors = cursors.next()
        if const_expr(cfg.trims and cfg.folds):
            for _ in cutlass.range(cutlass.max(first, wg_of_head.stop), of_head.stop, unroll=1):
                consumer.skip(cursors, has_dq)
                cursors = cursors.next()
    if const_expr(has_dq):
        consumer.finish(work, cursors)
    else:
        cursors.last_ds.wait()
        stage_gradients(context, work, consumer)
