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
from cutlass import Int32, const_expr

from ...bwd.device.work import first_member
from ...pipeline.cursor import Cursor, consume, produce
from ..wgmma import ROWS, wait
from .common.config import CONSUMERS
from .common.pointwise import Statistic, fill, rows_of, store_ds
from .common.work import Sm90BackwardWork, WarpgroupSteps, in_direction, warpgroup_steps, whole_blocks
from .config import Division
from .consumer import BackwardConsumer
from .context import Sm90BackwardContext
from .dq_cursor import DqCursor
from .epilogue import stage_gradients
from .pointwise import clear_ds, compute_ds, compute_p, pack_p, step_scores


class Cursors(NamedTuple):
    """A consumer's cursors before a step. last_ds: of the step before. last_dq: of the step before that."""

    q: Cursor
    do: Cursor
    ds: Cursor
    last_ds: Cursor
    last_dq: DqCursor

    def after_first(self) -> Cursors:
        """Return the cursors of the second step, before which no dQ has been computed."""
        return self._replace(q=self.q.next(), do=self.do.next(), ds=self.ds.next())

    def next(self) -> Cursors:
        """Return the cursors of the next step."""
        return Cursors._make(cursor.next() for cursor in self)


def consumer_steps(work: Sm90BackwardWork, consumer: Int32, cfg) -> WarpgroupSteps:
    """Return the steps of a consumer."""
    if not cfg.trims:
        return warpgroup_steps(work)
    mask, block = replace(work.mask, tile_n=ROWS), work.n_block * CONSUMERS + consumer
    first, _ = mask.query_blocks(block)
    first = cutlass.min(cutlass.max(first, work.first), work.stop)
    return in_direction(work, WarpgroupSteps(first, *whole_blocks(mask, block, first, work.stop), work.stop))


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
            skip(context, consumer, cursors, False)
        else:
            step(context, consumer, work, (Int32(0), work.first), cursors, True, False, True)
    elif const_expr(cfg.has_blocks):
        first_work = work.of_head(context, begin_member)
        if first_work.full_first > first_work.first:
            step(context, consumer, first_work, (begin_member, first_work.first), cursors, True, False, True)
        else:
            step(context, consumer, first_work, (begin_member, first_work.first), cursors, False, False, True)
    else:
        step(context, consumer, work, (Int32(0), work.first), cursors, True, False, True)
    cursors = cursors.after_first()
    for member in cutlass.range(cfg.group, unroll=1):
        of_head, wg_of_head = work, wg_steps
        if const_expr(cfg.differs_by_head):
            of_head = work.of_head(context, member)
            wg_of_head = consumer_steps(of_head, consumer.index, cfg)
        first = of_head.first + cutlass.select_(member == begin_member, Int32(1), Int32(0))
        if const_expr(cfg.trims and cfg.group > 1):
            for _ in cutlass.range(first, wg_of_head.first, unroll=1):
                skip(context, consumer, cursors, has_dq)
                cursors = cursors.next()
            first = cutlass.max(first, wg_of_head.first)
        for half in cutlass.range(
            2 if const_expr(cfg.has_left or cfg.folds) else 1, unroll=1
        ):  # partial blocks may be last
            begin_partial, end_partial = wg_of_head.partial(half, first)
            for i in cutlass.range(begin_partial, end_partial, unroll=1):
                step(context, consumer, of_head, (member, i), cursors, True, has_dq, False)
                cursors = cursors.next()
            begin_full, end_full = wg_of_head.full(half, first, of_head.first)
            for i in cutlass.range(begin_full, end_full, unroll=1):
                step(context, consumer, of_head, (member, i), cursors, False, has_dq, False)
                cursors = cursors.next()
        if const_expr(cfg.trims and cfg.folds):
            for _ in cutlass.range(cutlass.max(first, wg_of_head.stop), of_head.stop, unroll=1):
                skip(context, consumer, cursors, has_dq)
                cursors = cursors.next()
    if const_expr(has_dq):
        finish(context, consumer, work, cursors)
    else:
        cursors.last_ds.wait()
        stage_gradients(context, work, consumer)


@cute.jit
def step(
    context: Sm90BackwardContext,
    consumer: cutlass.Constexpr[BackwardConsumer],
    work,
    coord: tuple[Int32, Int32],
    cursors: Cursors,
    is_partial: cutlass.Constexpr[bool],
    has_dq: cutlass.Constexpr[bool],
    is_first: cutlass.Constexpr[bool],
):
    """Run one step on a block of queries. coord: (query head of the group, step). is_partial: some query may miss some
    key. has_dq: compute dQ of the step before here."""
    cfg, (q, do, ds, last_ds, last_dq) = context.cfg, cursors
    s, dp = cfg.scores.accumulator(), cfg.dp.accumulator()
    q.wait()
    cfg.scores.issue(s, consumer.k[None, None, None, 0], consumer.q[None, None, None, q.stage], False)
    if const_expr(is_first):
        consume(consumer.ends.load_compute_V).wait()
    do.wait()
    cfg.dp.issue(dp, consumer.v[None, None, None, 0], consumer.do[None, None, None, do.stage], False)
    scores = step_scores(context, work, coord, is_partial)
    rows = rows_of(context, q.stage)
    minus_lse = Statistic(rows, cfg)

    wait(1)
    p = compute_p(context, s, minus_lse, scores)
    minus_delta = Statistic(rows + cfg.tile_m, cfg)
    ds.wait()  # here: keeps the compiler from moving exp2 behind the wait for dP
    wait(0)
    p_operand, ds_operand = cfg.dv.a_registers(), cfg.dk.a_registers()
    fill(p_operand, pack_p(context, p, scores))
    packed_ds = compute_ds(context, s, p, minus_delta, dp, scores)
    fill(ds_operand, packed_ds)

    store_ds(context, ds.stage, consumer.index, packed_ds)
    cfg.dv.issue(consumer.dv, p_operand, consumer.do_columns[None, None, None, do.stage], True)
    ds.arrive()
    if const_expr(has_dq):
        last_ds.wait()
        dq = consumer.start_dq(last_ds, slice(1))
        wait(1)
        do.arrive()
        dq += consumer.start_dq(last_ds, slice(1, None))  # not earlier: they use the registers of P
        cfg.dk.issue(consumer.dk, ds_operand, consumer.q_columns[None, None, None, q.stage], True)
        wait(1)
        last_ds.arrive()
        last_dq.store(context, consumer.index, dq)
        last_dq.next().arrive(consumer.index)
    else:
        cfg.dk.issue(consumer.dk, ds_operand, consumer.q_columns[None, None, None, q.stage], True)
        wait(1)
        do.arrive()
    wait(0)
    cute.arch.sync_warp()  # every lane has read the statistics that came with Q before one lane arrives
    q.arrive()


@cute.jit
def skip(
    context: Sm90BackwardContext,
    consumer: cutlass.Constexpr[BackwardConsumer],
    cursors: Cursors,
    has_dq: cutlass.Constexpr[bool],
):
    """Run one step whose queries see none of this consumer's keys: its dS is zero. has_dq: see `step`."""
    q, do, ds, last_ds, last_dq = cursors
    q.wait()
    if const_expr(not has_dq):
        consume(consumer.ends.load_compute_V).wait()
    do.wait()
    ds.wait()
    clear_ds(context, ds.stage, consumer.index)
    ds.arrive()
    if const_expr(has_dq):
        last_ds.wait()
        dq = consumer.start_dq(last_ds, slice(None))
        wait(0)
        last_ds.arrive()
        last_dq.store(context, consumer.index, dq)
        last_dq.next().arrive(consumer.index)
    do.arrive()
    q.arrive()


@cute.jit
def finish(
    context: Sm90BackwardContext,
    consumer: cutlass.Constexpr[BackwardConsumer],
    work: Sm90BackwardWork,
    cursors: Cursors,
):
    """Compute dQ of the last step; meanwhile dV and dK leave the registers."""
    cursors.last_ds.wait()
    dq = consumer.start_dq(cursors.last_ds, slice(None))
    stage_gradients(context, work, consumer)
    wait(0)
    cursors.last_dq.store(context, consumer.index, dq)
    cursors.last_dq.next().arrive(consumer.index)
