"""The steps of a block of keys, in which the two warpgroups need not keep pace.

Per step: S^T = K Q^T and dP^T = V dO^T; P^T = exp2(S^T - lse) while dP^T is computed; dS^T = P^T (dP^T - delta), which
goes to shared memory. Then dV += P^T dO; dQ of the step before, whose dS both warpgroups have written since; and dK +=
dS^T Q, beside which dQ leaves the registers. So one warpgroup's products may run beside the other's P and dS.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...bwd.work import first_member
from ...pipeline.cursor import Cursor, consume, produce
from ..wgmma import wait
from .config import Division
from .consumer import BackwardConsumer
from .epilogue import stage_gradients
from .handing import Handing
from .pointwise import Statistic, clear_ds, fill, for_dv, rows_of, slopes, store_ds, weights, where
from .work import own_steps


class Cursors(NamedTuple):
    """Where a warpgroup stands before a step. last_ds: of the step before. last_dq: of the one before that."""

    q: Cursor
    do: Cursor
    ds: Cursor
    last_ds: Cursor
    last_dq: Handing

    def after_first(self) -> Cursors:
        """Those of the second step, at which no dQ has been computed."""
        return self._replace(q=self.q.next(), do=self.do.next(), ds=self.ds.next())

    def next(self) -> Cursors:
        """Those of the step that follows."""
        return Cursors(*(cursor.next() for cursor in self))


@cute.jit
def all_steps(context, consumer: cutlass.Constexpr[BackwardConsumer], work):
    """All steps of a block of keys; there is one at least."""
    if cutlass.const_expr(context.cfg.division is not Division.NONE):
        steps(context, consumer, work, True)
    else:
        if consumer.index == 0:
            steps(context, consumer, work, True)
        else:
            steps(context, consumer, work, False)


@cute.jit
def steps(context, consumer: cutlass.Constexpr[BackwardConsumer], work, has_dq: cutlass.Constexpr[bool]):
    """Those of a warpgroup that computes dQ, or a share of it, or has none."""
    cfg, ends = context.cfg, consumer.ends
    q, do, ds = consume(ends.load_compute_Q), consume(ends.load_compute_dO), produce(ends.compute_compute_dS)
    last_dq = Handing.before_first(ends.compute_reduce_dQ, cfg)
    at = Cursors(q, do, ds, consume(ends.compute_compute_dS), last_dq)
    own, begin = own_steps(work, consumer.index, cfg), first_member(context, work)
    if cutlass.const_expr(cfg.trims):
        if (own.first > work.first) | (own.stop == work.first):
            skip(context, consumer, at, False)
        else:
            step(context, consumer, work, (Int32(0), work.first), at, True, False, True)
    elif cutlass.const_expr(cfg.has_blocks):
        of_first = work.of_head(context, begin)
        if of_first.full_first > of_first.first:
            step(context, consumer, of_first, (begin, of_first.first), at, True, False, True)
        else:
            step(context, consumer, of_first, (begin, of_first.first), at, False, False, True)
    else:
        step(context, consumer, work, (Int32(0), work.first), at, True, False, True)
    at = at.after_first()
    for member in cutlass.range(cfg.group, unroll=1):
        of_head, own_of_head = work, own
        if cutlass.const_expr(cfg.differs_by_head):
            of_head = work.of_head(context, member)
            own_of_head = own_steps(of_head, consumer.index, cfg)
        first = of_head.first + cutlass.select_(member == begin, Int32(1), Int32(0))
        if cutlass.const_expr(cfg.trims and cfg.group > 1):
            for _ in cutlass.range(first, own_of_head.first, unroll=1):
                skip(context, consumer, at, has_dq)
                at = at.next()
            first = cutlass.max(first, own_of_head.first)
        for half in cutlass.range(2 if cfg.has_left or cfg.folds else 1, unroll=1):  # cut blocks may come last, too
            begin_cut, end_cut = own_of_head.cut(half, first)
            for i in cutlass.range(begin_cut, end_cut, unroll=1):
                step(context, consumer, of_head, (member, i), at, True, has_dq, False)
                at = at.next()
            begin_full, end_full = own_of_head.full(half, first, of_head.first)
            for i in cutlass.range(begin_full, end_full, unroll=1):
                step(context, consumer, of_head, (member, i), at, False, has_dq, False)
                at = at.next()
        if cutlass.const_expr(cfg.trims and cfg.folds):
            for _ in cutlass.range(cutlass.max(first, own_of_head.stop), of_head.stop, unroll=1):
                skip(context, consumer, at, has_dq)
                at = at.next()
    if cutlass.const_expr(has_dq):
        finish(context, consumer, work, at)
    else:
        at.last_ds.wait()
        stage_gradients(context, work, consumer)


@cute.jit
def step(
    context,
    consumer: cutlass.Constexpr[BackwardConsumer],
    work,
    place: tuple[Int32, Int32],
    at: Cursors,
    is_cut: cutlass.Constexpr[bool],
    has_dq: cutlass.Constexpr[bool],
    is_first: cutlass.Constexpr[bool],
):
    """One block of queries, at a `place`: query head of the group, step.

    is_cut: some query misses some key. has_dq: the last step's dQ is to be computed here.
    """
    cfg, (q, do, ds, last_ds, last_dq) = context.cfg, at
    s, dp = cfg.scores.accumulator(), cfg.dp.accumulator()
    q.wait()
    consumer.start_scores(s, q)
    if cutlass.const_expr(is_first):
        consume(consumer.ends.load_compute_V).wait()
    do.wait()
    consumer.start_dp(dp, do)
    scores_at = where(context, work, place, is_cut)
    rows = rows_of(context, q.stage)
    minus_lse = Statistic(rows, cfg)

    wait(1)
    p = weights(context, s, minus_lse, scores_at)
    minus_delta = Statistic(rows + cfg.tile_m, cfg)
    ds.wait()  # here, so that the compiler does not move exp2 behind the wait for dP
    wait(0)
    p_operand, ds_operand = cfg.dv.a_registers(), cfg.dk.a_registers()
    fill(p_operand, for_dv(context, p, scores_at))
    ds_words = slopes(context, s, p, minus_delta, dp, scores_at)
    fill(ds_operand, ds_words)

    store_ds(context, ds.stage, consumer.index, ds_words)
    consumer.add_dv(p_operand, do)
    ds.arrive()
    if cutlass.const_expr(has_dq):
        last_ds.wait()
        dq = consumer.start_dq(last_ds, slice(1))
        wait(1)
        do.arrive()
        dq += consumer.start_dq(last_ds, slice(1, None))  # not before: they take the registers that P had
        consumer.add_dk(ds_operand, q)
        wait(1)
        last_ds.arrive()
        last_dq.give(context, consumer.index, dq)
        last_dq.next().expect_tx(consumer.index)
    else:
        consumer.add_dk(ds_operand, q)
        wait(1)
        do.arrive()
    wait(0)
    cute.arch.sync_warp()  # every lane has read the statistics that came with Q, when one of them says so
    q.arrive()


@cute.jit
def skip(context, consumer: cutlass.Constexpr[BackwardConsumer], at: Cursors, has_dq: cutlass.Constexpr[bool]):
    """One block of queries that see none of this warpgroup's keys: its dS is zero. has_dq: see `step`."""
    q, do, ds, last_ds, last_dq = at
    q.wait()
    if cutlass.const_expr(not has_dq):
        consume(consumer.ends.load_compute_V).wait()
    do.wait()
    ds.wait()
    clear_ds(context, ds.stage, consumer.index)
    ds.arrive()
    if cutlass.const_expr(has_dq):
        last_ds.wait()
        dq = consumer.start_dq(last_ds, slice(None))
        wait(0)
        last_ds.arrive()
        last_dq.give(context, consumer.index, dq)
        last_dq.next().expect_tx(consumer.index)
    do.arrive()
    q.arrive()


@cute.jit
def finish(context, consumer: cutlass.Constexpr[BackwardConsumer], work, at: Cursors):
    """dQ of the last step, beside which dV and dK leave the registers."""
    at.last_ds.wait()
    dq = consumer.start_dq(at.last_ds, slice(None))
    stage_gradients(context, work, consumer)
    wait(0)
    at.last_dq.give(context, consumer.index, dq)
    at.last_dq.next().expect_tx(consumer.index)
