"""Steps that overlap: while a warpgroup makes P and dS of one step, the matrix unit works on the products of two.

A turn of the loop has, of step j, dV += P^T dO, dQ = dS K and dK += dS^T Q, and of step j + 1 S^T, dP^T, P^T and dS^T.
The products are queued in the order dV, dQ, S, dP, dK, so that P is made beside dP and dK, and dS beside dK; dQ leaves
the registers beside S. Between two turns P and dS of a step are in registers, as left operands.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...pipeline.cursor import Cursor, consume, produce
from ..wgmma import wait
from .handing import Handing
from .pointwise import Statistic, fill, rounded, rows_of, slopes, store_ds, weights, where
from .team import Team


@cute.jit
def overlapped_steps(context, team: cutlass.Constexpr[Team], work):
    """All steps of a block of keys; there is one at least."""
    cfg, ends = context.cfg, team.ends
    p, ds = cfg.dv.a_registers(), cfg.dk.a_registers()
    q, do = consume(ends.load_compute_Q), consume(ends.load_compute_dO)
    dq = Handing.before_first(ends.compute_reduce_dQ, cfg.reducers)
    if cutlass.const_expr(cfg.has_blocks):
        if work.full_first > work.first:
            begin(context, team, work, q, do, p, ds, True)
        else:
            begin(context, team, work, q, do, p, ds, False)
    else:
        begin(context, team, work, q, do, p, ds, True)
    for member in cutlass.range(cfg.group, unroll=1):
        first = work.first + cutlass.select_(member == 0, Int32(1), Int32(0))
        for i in cutlass.range(first, work.full_first, unroll=1):
            turn(context, team, work, (member, i), q, do, dq, p, ds, True)
            q, do, dq = q.next(), do.next(), dq.next()
        for i in cutlass.range(cutlass.max(first, work.full_first), work.full_stop, unroll=1):
            turn(context, team, work, (member, i), q, do, dq, p, ds, False)
            q, do, dq = q.next(), do.next(), dq.next()
        if cutlass.const_expr(cfg.has_left):
            for i in cutlass.range(cutlass.max(first, work.full_stop), work.stop, unroll=1):
                turn(context, team, work, (member, i), q, do, dq, p, ds, True)
                q, do, dq = q.next(), do.next(), dq.next()
    end(context, team, q, do, dq, p, ds)


@cute.jit
def begin(
    context,
    team: cutlass.Constexpr[Team],
    work,
    q: Cursor,
    do: Cursor,
    p_operand: cute.Tensor,
    ds_operand: cute.Tensor,
    is_cut: cutlass.Constexpr[bool],
):
    """P and dS of the first step."""
    cfg = context.cfg
    s, dp = cfg.scores.accumulator(), cfg.dp.accumulator()
    q.wait()
    team.start_scores(s, q)
    do.wait()
    team.start_dp(dp, do)
    rows, at = rows_of(context, q.stage), where(context, work, (Int32(0), work.first), is_cut)
    wait(1)
    p = weights(context, s, Statistic(rows, cfg), at)
    wait(0)
    ds_words = slopes(context, s, p, Statistic(rows + cfg.tile_m, cfg), dp, at)
    fill(p_operand, rounded(p, cfg.dtype))
    fill(ds_operand, ds_words)
    store_ds(context, do.stage, team.index, ds_words)
    do.in_step(produce(team.ends.compute_compute_dS)).arrive()


@cute.jit
def turn(
    context,
    team: cutlass.Constexpr[Team],
    work,
    place: tuple[Int32, Int32],
    q: Cursor,
    do: Cursor,
    last_dq: Handing,
    p_operand: cute.Tensor,
    ds_operand: cute.Tensor,
    is_cut: cutlass.Constexpr[bool],
):
    """dV, dQ and dK of the step at q and do; P and dS of the next one, a block of queries at a `place`: query head of
    the group, step.

    last_dq: of the step before. is_cut: some query of the block misses some key.
    """
    cfg, ends = context.cfg, team.ends
    next_q, next_do = q.next(), do.next()
    s, dp, dq = cfg.scores.accumulator(), cfg.dp.accumulator(), cfg.dq.accumulator()
    team.add_dv(p_operand, do)
    ds = do.in_step(consume(ends.compute_compute_dS))
    ds.wait()
    team.start_dq(dq, ds)
    wait(1)
    do.arrive()
    next_q.wait()
    team.start_scores(s, next_q)
    last_dq.wait_left(team.index)
    wait(1)
    last_dq.give(context, team.index, dq)
    next_do.wait()
    team.start_dp(dp, next_do)
    team.add_dk(ds_operand, q)
    last_dq.next().announce(team.index)
    rows = rows_of(context, next_q.stage)
    at = where(context, work, place, is_cut)

    wait(2)
    p = weights(context, s, Statistic(rows, cfg), at)
    next_do.wait()  # once more, which takes no time: the compiler moves no exp2 past it, behind the wait for dP
    wait(1)
    ds_words = slopes(context, s, p, Statistic(rows + cfg.tile_m, cfg), dp, at)
    store_ds(context, next_do.stage, team.index, ds_words)
    next_do.in_step(produce(ends.compute_compute_dS)).arrive()
    wait(0)
    q.arrive()
    fill(p_operand, rounded(p, cfg.dtype))
    fill(ds_operand, made_now(context, ds_words))


@cute.jit
def end(
    context,
    team: cutlass.Constexpr[Team],
    q: Cursor,
    do: Cursor,
    last_dq: Handing,
    p_operand: cute.Tensor,
    ds_operand: cute.Tensor,
):
    """dV, dQ and dK of the last step."""
    dq = context.cfg.dq.accumulator()
    team.add_dv(p_operand, do)
    ds = do.in_step(consume(team.ends.compute_compute_dS))
    ds.wait()
    team.start_dq(dq, ds)
    team.add_dk(ds_operand, q)
    last_dq.wait_left(team.index)
    wait(1)
    last_dq.give(context, team.index, dq)
    last_dq.next().announce(team.index)
    wait(0)
    do.arrive()
    q.arrive()


def made_now(context, words: list[Int32]) -> list[Int32]:
    """The same words, made by arithmetic here: ptxas serialises all products where what makes a left operand stands
    between the start and the end of another product. It does not know that lengths are not negative."""
    zero = context.args.seqlen_q >> 31
    return [word | zero for word in words]
