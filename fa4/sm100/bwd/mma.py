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

from ...pipeline.cursor import ALL, Cursor, consume, produce
from ...pipeline.ends import LEADER
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
    base = tmem.base(context.smem)
    zero = opaque_zero(context) if cutlass.const_expr(is_pair) else 0
    q, do = consume(ends.load_mma_Q), consume(ends.load_mma_dO)
    # One turn a step: what all of these channels go by.
    p, ds, dq = consume(ends.compute_mma_P), consume(ends.compute_mma_dS), produce(ends.mma_reduce_dQ, ALL)
    if cutlass.const_expr(is_pair):
        q_columns, do_columns = consume(ends.load_mma_Qcolumns), consume(ends.load_mma_dOcolumns)
    consume(ends.load_mma_K).wait()
    q.wait()
    issue_scores(context, ends, base, zero, q)
    consume(ends.load_mma_V).wait()
    for i in cutlass.range(steps, unroll=1):
        if cutlass.const_expr(is_pair):
            zero = read_zero(context)  # again, see `place`
        do.wait()
        if cutlass.const_expr(cfg.dq_over_dp):
            p.in_step(dq).wait(0)
        do_place = place(context, zero, "dO") + do.stage * cfg.do_tile.nbytes
        with cute.arch.elect_one():
            cfg.dp.issue(base + spans.dP, cfg.dp.a.at(place(context, zero, "V")), cfg.dp.b.at(do_place), False)
            ends.mma_compute_dP.commit_full(0)
            if cutlass.const_expr(is_pair):
                do.commit()

        p.wait()
        if cutlass.const_expr(is_pair):
            do_place = place(context, zero, "dOcolumns")
            p.in_step(do_columns).wait()
        with cute.arch.elect_one():
            issue_by_halves(cfg.dv, base + spans.dV, base + spans.P, cfg.dv.b.at(do_place), i > 0)
            if cutlass.const_expr(is_pair):
                do_columns.commit()
            else:
                do.commit()
        do = do.next()

        read = q
        q = q.next()
        if i + 1 < steps:
            q.wait()
            issue_scores(context, ends, base, zero, q)
        else:
            with cute.arch.elect_one():
                ends.mma_compute_dV.commit_full(0)

        p.in_step(ds).wait()
        if cutlass.const_expr(is_pair):
            if i == 0:
                consume(ends.load_mma_Kcolumns).wait()
            issue_dq(context, ends, base, zero)
            p.in_step(q_columns).wait()
            issue_dk(context, base, q_columns, place(context, zero, "Qcolumns"), i > 0)
        else:
            q_place = place(context, zero, "Q") + read.stage * cfg.q_tile.nbytes
            issue_dk(context, base, read, q_place, i > 0)
            if cutlass.const_expr(not cfg.dq_over_dp):
                p.in_step(dq).wait(0)
            if cutlass.const_expr(cfg.dq_transposed):
                issue_dq_transposed(context, base, p.in_step(dq))
            else:
                issue_dq(context, ends, base, zero)
        p = p.next()
    with cute.arch.elect_one():
        ends.mma_compute_dK.commit_full(0)


def place(context, zero, name):
    """Shared-memory address of a tile. A pair's is counted from `zero`: with one stage of each tile no address changes
    from step to step, and the compiler would compute all of them before the loop, keep them in vector registers for
    want of uniform ones, and move them back one by one. So each step reads a zero of which it knows nothing."""
    return context.smem.address(name) + zero


@cute.jit
def opaque_zero(context):
    """Put the zero there, one warp, and read it."""
    with cute.arch.elect_one():
        cute.make_tensor(context.smem.pointer("zero", Int32), cute.make_layout(1))[0] = Int32(0)
    cute.arch.sync_warp()
    return read_zero(context)


def read_zero(context) -> Int32:
    return cute.arch.make_warp_uniform(cute.make_tensor(context.smem.pointer("zero", Int32), cute.make_layout(1))[0])


def issue_scores(context, ends, base, zero, q: Cursor):
    """S^T of a Q tile; a pair reads that copy of Q no more."""
    scores = context.cfg.scores
    q_place = place(context, zero, "Q") + q.stage * context.cfg.q_tile.nbytes
    with cute.arch.elect_one():
        scores.issue(base + context.tmem.S, scores.a.at(place(context, zero, "K")), scores.b.at(q_place), False)
        ends.mma_compute_S.commit_full(0)
        if context.cfg.ctas == 2:
            q.commit()


def issue_dk(context, base, q: Cursor, q_place, accumulate):
    """dK, whose Q is then free."""
    cfg, spans = context.cfg, context.tmem
    with cute.arch.elect_one():
        issue_by_halves(cfg.dk, base + spans.dK, base + spans.dS, cfg.dk.b.at(q_place), accumulate)
        q.commit()


def issue_by_halves(umma, d, a, b, accumulate):
    """D += A B, A from tensor memory: each compute warpgroup has put its half of the reduction, packed, at its own end
    of the scores' columns."""
    steps = umma.steps // HALVES
    for half in range(HALVES):
        gap = half * umma.k // HALVES  # columns that packing left unused between the halves
        umma.issue(d, a + gap, b, accumulate, range(half * steps, (half + 1) * steps))


def issue_dq(context, ends, base, zero):
    """dQ."""
    cfg = context.cfg
    with cute.arch.elect_one():
        keys = place(context, zero, "Kcolumns" if cfg.ctas == 2 else "K")
        cfg.dq.issue(base + context.tmem.dQ, cfg.dq.a.at(place(context, zero, "dS")), cfg.dq.b.at(keys), False)
        ends.mma_reduce_dQ.commit_full(0)


def issue_dq_transposed(context, base, dq: Cursor):
    """dQ^T: its last rows over dP, whose place was waited for before dP; then its first LANES rows."""
    cfg, spans, smem = context.cfg, context.tmem, context.smem
    low, high = cfg.dq_transpose(LANES), cfg.dq_transpose(cfg.columns - LANES)
    ds = low.b.at(smem.address("dS"))
    with cute.arch.elect_one():
        high_columns = smem.address("K") + LANES // cfg.k_tile.panel_columns * cfg.k_tile.panel_bytes
        high.issue(base + spans.dQ_high, high.a.at(high_columns), ds, False)
        dq.commit(0)
    dq.wait(1)
    with cute.arch.elect_one():
        low.issue(base + spans.dQ, low.a.at(smem.address("K")), ds, False)
        dq.commit(1)
