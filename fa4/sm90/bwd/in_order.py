"""Steps one after the other: for 128 queries, whose scores leave no registers for another step's.

Per step: S^T = K Q^T and dP^T = V dO^T; P^T = exp2(S^T - lse) while dP^T is computed; dS^T = P^T (dP^T - delta). Then
dV += P^T dO, and dS goes to shared memory; with the other warpgroup's dS there too, dQ; and dK += dS^T Q, beside which
dQ leaves the registers. That it has left is said in the next step, where nothing waits for the fence.
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
def steps_in_order(context, team: cutlass.Constexpr[Team], work):
    """All steps of a block of keys."""
    cfg, ends = context.cfg, team.ends
    q, do = consume(ends.load_compute_Q), consume(ends.load_compute_dO)
    dq = Handing.before_first(ends.compute_reduce_dQ, cfg.reducers)
    follows = Int32(0)  # whether there was a step before
    for member in cutlass.range(cfg.group, unroll=1):
        for i in cutlass.range(work.first, work.full_first, unroll=1):
            step(context, team, work, (member, i), q, do, dq, follows, True)
            q, do, dq, follows = q.next(), do.next(), dq.next(), Int32(1)
        for i in cutlass.range(work.full_first, work.full_stop, unroll=1):
            step(context, team, work, (member, i), q, do, dq, follows, False)
            q, do, dq, follows = q.next(), do.next(), dq.next(), Int32(1)
        if cutlass.const_expr(cfg.has_left):
            for i in cutlass.range(work.full_stop, work.stop, unroll=1):
                step(context, team, work, (member, i), q, do, dq, follows, True)
                q, do, dq, follows = q.next(), do.next(), dq.next(), Int32(1)
    dq.announce(team.index)


@cute.jit
def step(
    context,
    team: cutlass.Constexpr[Team],
    work,
    place: tuple[Int32, Int32],
    q: Cursor,
    do: Cursor,
    last_dq: Handing,
    follows: Int32,
    is_cut: cutlass.Constexpr[bool],
):
    """One block of queries, at a `place`: query head of the group, step.

    last_dq: of the step before, if it `follows` one. is_cut: some query misses some key.
    """
    cfg, ends = context.cfg, team.ends
    ds = do.in_step(consume(ends.compute_compute_dS))
    s, dp, dq = cfg.scores.accumulator(), cfg.dp.accumulator(), cfg.dq.accumulator()
    q.wait()
    team.start_scores(s, q)
    do.wait()
    team.start_dp(dp, do)
    if follows > 0:
        last_dq.announce(team.index)
    at = where(context, work, place, is_cut)
    rows = rows_of(context, q.stage)
    minus_lse = Statistic(rows, cfg)

    wait(1)
    p = weights(context, s, minus_lse, at)
    minus_delta = Statistic(rows + cfg.tile_m, cfg)
    last_dq.wait_left(team.index)  # here, so that the compiler does not move exp2 behind the wait for dP
    wait(0)
    p_operand, ds_operand = cfg.dv.a_registers(), cfg.dk.a_registers()
    fill(p_operand, rounded(p, cfg.dtype))
    ds_words = slopes(context, s, p, minus_delta, dp, at)
    fill(ds_operand, ds_words)

    store_ds(context, ds.stage, team.index, ds_words)
    team.add_dv(p_operand, do)
    do.in_step(produce(ends.compute_compute_dS)).arrive()
    ds.wait()
    team.start_dq(dq, ds)
    wait(1)
    do.arrive()
    team.add_dk(ds_operand, q)
    wait(1)
    last_dq.give(context, team.index, dq)
    wait(0)
    q.arrive()
