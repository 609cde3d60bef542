"""MMA role, one warp, one elected thread: issues every product; of a pair of CTAs, the leader's warp does for both.

Per step: dP^T = V dO^T, dV += P^T dO, then the next step's S^T = K Q^T, then dK += dS^T Q and dQ = dS K. So the next
step's softmax runs beside this step's dK and dQ. The matrix unit works in order: S^T may overwrite P^T, and dQ or dP^T
may overwrite dS^T, once the products that read those have been issued. A pair's dQ lies beside dS^T and comes before
dK, so that it has left tensor memory when the next dP^T arrives.

Waits:   load_mma_*.full, compute_mma_P.full, compute_mma_dS.full, mma_reduce_dQ.free
Signals: mma_compute_{S,dP,dV,dK}.full, mma_reduce_dQ.full, load_mma_*.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...pipeline.channels import LEADER, Ring
from .. import tmem
from .config import HALVES, LANES
from .work import work_tile


@cute.jit
def mma(context):
    work = work_tile(context)
    if (work.steps > 0) & (work.rank == LEADER):
        issue(context, context.ends("mma"), work.steps)


@cute.jit
def issue(context, ends, steps: Int32):
    cfg, spans = context.cfg, context.tmem
    is_pair = cutlass.const_expr(cfg.ctas == 2)
    holder = context.smem.pointer("tmem", Int32)
    base = tmem.base(holder)
    q, do = Ring.consumer(ends.load_mma_Q.channel), Ring.consumer(ends.load_mma_dO.channel)
    phase = Int32(0)
    ends.load_mma_K.wait_full(0, 0)
    ends.load_mma_Q.wait_full(q.index, q.phase)
    issue_scores(context, ends, base, q.index)
    ends.load_mma_V.wait_full(0, 0)
    for i in cutlass.range(steps, unroll=1):
        if cutlass.const_expr(is_pair):
            base = tmem.base(holder)  # read again, see `place`
        ends.load_mma_dO.wait_full(do.index, do.phase)
        if cutlass.const_expr(cfg.dq_over_dp):
            ends.mma_reduce_dQ.wait_free(0, phase ^ 1)
        do_place = place(context, base, "dO") + do.index * cfg.do_tile.nbytes
        with cute.arch.elect_one():
            cfg.dp.issue(base + spans.dP, cfg.dp.a.at(place(context, base, "V")), cfg.dp.b.at(do_place), False)
            ends.mma_compute_dP.commit_full(0)
            if cutlass.const_expr(is_pair):
                ends.load_mma_dO.commit_free(do.index)

        ends.compute_mma_P.wait_full(0, phase)
        if cutlass.const_expr(is_pair):
            do_place = place(context, base, "dOcolumns")
            ends.load_mma_dOcolumns.wait_full(0, phase)
        with cute.arch.elect_one():
            issue_by_halves(cfg.dv, base + spans.dV, base + spans.P, cfg.dv.b.at(do_place), i > 0)
            if cutlass.const_expr(is_pair):
                ends.load_mma_dOcolumns.commit_free(0)
            else:
                ends.load_mma_dO.commit_free(do.index)
        do = do.next()

        stage = q.index
        q = q.next()
        if i + 1 < steps:
            ends.load_mma_Q.wait_full(q.index, q.phase)
            issue_scores(context, ends, base, q.index)
        else:
            with cute.arch.elect_one():
                ends.mma_compute_dV.commit_full(0)

        ends.compute_mma_dS.wait_full(0, phase)
        if cutlass.const_expr(is_pair):
            if i == 0:
                ends.load_mma_Kcolumns.wait_full(0, 0)
            issue_dq(context, ends, base)
            ends.load_mma_Qcolumns.wait_full(0, phase)
            issue_dk(context, base, ends.load_mma_Qcolumns, 0, place(context, base, "Qcolumns"), i > 0)
        else:
            q_place = place(context, base, "Q") + stage * cfg.q_tile.nbytes
            issue_dk(context, base, ends.load_mma_Q, stage, q_place, i > 0)
            if cutlass.const_expr(not cfg.dq_over_dp):
                ends.mma_reduce_dQ.wait_free(0, phase ^ 1)
            issue_dq(context, ends, base)
        phase = phase ^ 1
    with cute.arch.elect_one():
        ends.mma_compute_dK.commit_full(0)


def place(context, base, name):
    """Shared-memory address of a tile. A pair's is counted from `base`: with one stage of each tile no address changes
    from step to step, and the compiler would compute all of them before the loop, keep them in vector registers for
    want of uniform ones, and move them back one by one. So each step reads `base` again."""
    address = context.smem.address(name)
    return address + base if context.cfg.ctas == 2 else address


def issue_scores(context, ends, base, stage):
    """S^T of the Q tile in `stage`; a pair reads that copy of Q no more."""
    scores = context.cfg.scores
    q_place = place(context, base, "Q") + stage * context.cfg.q_tile.nbytes
    with cute.arch.elect_one():
        scores.issue(base + context.tmem.S, scores.a.at(place(context, base, "K")), scores.b.at(q_place), False)
        ends.mma_compute_S.commit_full(0)
        if context.cfg.ctas == 2:
            ends.load_mma_Q.commit_free(stage)


def issue_dk(context, base, q_channel, stage, q_place, accumulate):
    """dK, whose Q is then free."""
    cfg, spans = context.cfg, context.tmem
    with cute.arch.elect_one():
        issue_by_halves(cfg.dk, base + spans.dK, base + spans.dS, cfg.dk.b.at(q_place), accumulate)
        q_channel.commit_free(stage)


def issue_by_halves(umma, d, a, b, accumulate):
    """D += A B, A from tensor memory: each compute warpgroup has put its half of the reduction, packed, at its own end
    of the scores' columns."""
    steps = umma.steps // HALVES
    for half in range(HALVES):
        gap = half * umma.k // HALVES  # columns that packing left unused between the halves
        umma.issue(d, a + gap, b, accumulate, range(half * steps, (half + 1) * steps))


def issue_dq(context, ends, base):
    """dQ, or dQ^T: its first LANES rows, then the rest over dP."""
    cfg, spans, smem = context.cfg, context.tmem, context.smem
    with cute.arch.elect_one():
        if cfg.dq_transposed:
            low, high = cfg.dq_transpose(LANES), cfg.dq_transpose(cfg.columns - LANES)
            ds = low.b.at(smem.address("dS"))
            low.issue(base + spans.dQ, low.a.at(smem.address("K")), ds, False)
            high_columns = smem.address("K") + LANES // cfg.k_tile.panel_columns * cfg.k_tile.panel_bytes
            high.issue(base + spans.dQ_high, high.a.at(high_columns), ds, False)
        else:
            keys = place(context, base, "Kcolumns" if cfg.ctas == 2 else "K")
            cfg.dq.issue(base + spans.dQ, cfg.dq.a.at(place(context, base, "dS")), cfg.dq.b.at(keys), False)
        ends.mma_reduce_dQ.commit_full(0)
