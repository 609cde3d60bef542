"""MMA role, one warp, one elected thread: issues every product; the leader of a CTA pair issues for both CTAs.

Per step: dP^T = V dO^T, dV += P^T dO, then S^T = K Q^T of the next step, then dK += dS^T Q and dQ = dS K. So the
softmax of the next step overlaps dK and dQ of this step. The matrix unit works in order: S^T may overwrite P^T, and dQ
or dP^T may overwrite dS^T, when the products that read them have been issued. A pair's dQ lies between the halves of
dS^T and comes before dK, so that `reduce` has read it when the next dP^T is issued.

Waits:   load_mma_*.full, compute_mma_P.full, compute_mma_dS.full, mma_reduce_dQ.free
Signals: mma_compute_{S,dP,dV,dK}.full, mma_reduce_dQ.full, load_mma_*.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...pipeline.cursor import ALL, Cursor, consume, produce
from ...pipeline.ends import LEADER, Ends
from .. import tmem
from ..mma import Umma
from .block_scales import COLUMNS, ROWS, copy_scales_of, scales_of_product
from .config import HALVES, LANES, Sm100BackwardSteps, unpacked_columns
from .context import Sm100BackwardContext
from .work import work_tile


@cute.jit
def mma(context: Sm100BackwardContext):
    work = work_tile(context)
    if (work.steps > 0) & (work.rank == LEADER):
        issue(context, context.ends("mma"), work.steps)


@cute.jit
def issue(context: Sm100BackwardContext, ends: Ends, steps: Int32):
    cfg, spans = context.cfg, context.tmem
    is_pair = const_expr(cfg.ctas == 2)
    base = tmem.base(context.smem)
    zero = opaque_zero(context) if const_expr(is_pair) else 0
    q, do = consume(ends.load_mma_Q), consume(ends.load_mma_dO)
    # These cursors advance once per step, and other channels go in step with `p`.
    p, ds, dq = consume(ends.compute_mma_P), consume(ends.compute_mma_dS), produce(ends.mma_reduce_dQ, ALL)
    if const_expr(is_pair):
        q_columns, do_columns = consume(ends.load_mma_Qcolumns), consume(ends.load_mma_dOcolumns)
    consume(ends.load_mma_K).wait()
    copy_once(context, base, "K")
    q.wait()
    issue_scores(context, ends, base, zero, q)
    consume(ends.load_mma_V).wait()
    copy_once(context, base, "V")
    for i in cutlass.range(steps, unroll=1):
        if const_expr(is_pair):
            zero = read_zero(context)  # again in each step, see `smem_address`
        do.wait()
        if const_expr(cfg.dq_over_dp):
            p.at_iteration_of(dq).wait(0)
        do_address = smem_address(context, zero, "dO") + do.stage * cfg.do_tile.nbytes
        with cute.arch.elect_one():
            copy_scales_of(context, base, "dO", do.stage)
            v, scales = smem_address(context, zero, "V"), scales_of_product(context, base, "V", "dO", COLUMNS, do.stage)
            cfg.dp.issue(base + spans.dP, cfg.dp.a.at(v), cfg.dp.b.at(do_address), False, scales=scales)
            ends.mma_compute_dP.commit_full(0)
            if const_expr(is_pair):
                do.commit()

        p.wait()
        if const_expr(is_pair):
            do_address = smem_address(context, zero, "dOcolumns")
            p.at_iteration_of(do_columns).wait()
        with cute.arch.elect_one():
            scales = scales_of_product(context, base, None, "dO", ROWS, do.stage)
            issue_by_halves(cfg, cfg.dv, base + spans.dV, base + spans.P, cfg.dv.b.at(do_address), i > 0, scales)
            if const_expr(is_pair):
                do_columns.commit()
            else:
                do.commit()
        do = do.next()

        used_q = q
        q = q.next()
        if i + 1 < steps:
            q.wait()
            issue_scores(context, ends, base, zero, q)
        else:
            with cute.arch.elect_one():
                ends.mma_compute_dV.commit_full(0)

        p.at_iteration_of(ds).wait()
        if const_expr(is_pair):
            if i == 0:
                consume(ends.load_mma_Kcolumns).wait()
            issue_dq(context, ends, base, zero)
            p.at_iteration_of(q_columns).wait()
            issue_dk(context, base, q_columns, smem_address(context, zero, "Qcolumns"), i > 0)
        else:
            q_address = smem_address(context, zero, "Q") + used_q.stage * cfg.q_tile.nbytes
            issue_dk(context, base, used_q, q_address, i > 0)
            if const_expr(not cfg.dq_over_dp):
                p.at_iteration_of(dq).wait(0)
            if const_expr(cfg.dq_transposed):
                issue_dq_transposed(context, base, p.at_iteration_of(dq))
            else:
                issue_dq(context, ends, base, zero)
        p = p.next()
    with cute.arch.elect_one():
        ends.mma_compute_dK.commit_full(0)


@cute.jit
def copy_once(context: Sm100BackwardContext, base: Int32, name: cutlass.Constexpr[str]):
    """Copy the scales of K or V, if there are any."""
    if const_expr(context.cfg.has_block_scales):
        with cute.arch.elect_one():
            copy_scales_of(context, base, name)


def smem_address(context: Sm100BackwardContext, zero: Int32 | int, name: str):
    """Shared-memory address of a tile, plus `zero` for a pair.

    A pair has one stage per tile, so addresses are the same in every step. The compiler would compute all of them
    before the loop, keep them in vector registers because uniform registers are few, and move them back one by one. So
    each step adds a zero that the compiler does not know.
    """
    return context.smem.address(name) + zero


@cute.jit
def opaque_zero(context: Sm100BackwardContext):
    """One warp: store a zero in shared memory and read it back."""
    with cute.arch.elect_one():
        cute.make_tensor(context.smem.pointer("zero", Int32), cute.make_layout(1))[0] = Int32(0)
    cute.arch.sync_warp()
    return read_zero(context)


def read_zero(context: Sm100BackwardContext) -> Int32:
    return cute.arch.make_warp_uniform(cute.make_tensor(context.smem.pointer("zero", Int32), cute.make_layout(1))[0])


def issue_scores(context: Sm100BackwardContext, ends: Ends, base: Int32, zero: Int32 | int, q: Cursor):
    """Issue S^T of a Q tile. A pair then frees this copy of Q."""
    scores = context.cfg.scores
    q_address = smem_address(context, zero, "Q") + q.stage * context.cfg.q_tile.nbytes
    with cute.arch.elect_one():
        copy_scales_of(context, base, "Q", q.stage)
        scales = scales_of_product(context, base, "K", "Q", COLUMNS, q.stage)
        k = scores.a.at(smem_address(context, zero, "K"))
        scores.issue(base + context.tmem.S, k, scores.b.at(q_address), False, scales=scales)
        ends.mma_compute_S.commit_full(0)
        if context.cfg.ctas == 2:
            q.commit()


def issue_dk(context: Sm100BackwardContext, base: Int32, q: Cursor, q_address: Int32, accumulate):
    """Issue dK += dS^T Q, then free Q."""
    cfg, spans = context.cfg, context.tmem
    with cute.arch.elect_one():
        scales = scales_of_product(context, base, None, "Q", ROWS, q.stage)
        issue_by_halves(cfg, cfg.dk, base + spans.dK, base + spans.dS, cfg.dk.b.at(q_address), accumulate, scales)
        q.commit()


def issue_by_halves(cfg: Sm100BackwardSteps, umma: Umma, d, a, b, accumulate, scales: tuple | None = None):
    """Issue D += A B with A in tensor memory. Each compute warpgroup has stored its half of the reduction, packed, at
    its end of the score columns. scales: see `Umma.issue`."""
    steps = umma.steps // HALVES
    for half in range(HALVES):
        gap = half * HALVES * unpacked_columns(cfg)  # unused columns between the packed halves
        umma.issue(d, a + gap, b, accumulate, range(half * steps, (half + 1) * steps), scales)


def issue_dq(context: Sm100BackwardContext, ends: Ends, base: Int32, zero: Int32 | int):
    """Issue dQ = dS K."""
    cfg = context.cfg
    with cute.arch.elect_one():
        keys = smem_address(context, zero, "Kcolumns" if cfg.ctas == 2 else "K")
        ds, scales = smem_address(context, zero, "dS"), scales_of_product(context, base, None, "K", ROWS)
        cfg.dq.issue(base + context.tmem.dQ, cfg.dq.a.at(ds), cfg.dq.b.at(keys), False, scales=scales)
        ends.mma_reduce_dQ.commit_full(0)


def issue_dq_transposed(context: Sm100BackwardContext, base: Int32, dq: Cursor):
    """Issue dQ^T: first its last rows, over dP (mma waited for these columns before dP), then its first LANES rows."""
    cfg, spans, smem = context.cfg, context.tmem, context.smem
    low, high = cfg.dq_transpose(LANES), cfg.dq_transpose(cfg.columns - LANES)
    ds = low.b.at(smem.address("dS"))
    with cute.arch.elect_one():
        high_address = smem.address("K") + LANES // cfg.k_tile.panel_columns * cfg.k_tile.panel_bytes
        high.issue(base + spans.dQ_high, high.a.at(high_address), ds, False)
        dq.commit(0)
    dq.wait(1)
    with cute.arch.elect_one():
        low.issue(base + spans.dQ, low.a.at(smem.address("K")), ds, False)
        dq.commit(1)
