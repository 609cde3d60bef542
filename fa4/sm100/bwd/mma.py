"""MMA role, one warp, one elected thread: issues every product.

Per step: dP^T = V dO^T, dV += P^T dO, then the next step's S^T = K Q^T, then dK += dS^T Q and dQ = dS K. So the next
step's softmax runs beside this step's dK and dQ. The matrix unit works in order: S^T may overwrite P^T, and dQ dS^T,
once the products that read those have been issued.

Waits:   load_mma_{K,V,Q,dO}.full, compute_mma_P.full, compute_mma_dS.full, mma_reduce_dQ.free
Signals: mma_compute_{S,dP,dV,dK}.full, mma_reduce_dQ.full, load_mma_{Q,dO}.free, compute_mma_dS.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..channels import Ring
from ..mma import K_PER_MMA
from ..smem import PANEL_COLUMNS
from .config import HALVES, LANES
from .work import work_tile


@cute.jit
def mma(context):
    cfg, spans = context.cfg, context.tmem
    ends = context.ends("mma")
    places = {name: context.smem.address(name) for name in ("K", "V", "Q", "dO", "dS")}
    q, do = Ring.consumer(ends.load_mma_Q.channel), Ring.consumer(ends.load_mma_dO.channel)
    phase = Int32(0)
    work = work_tile(context)

    if work.steps > 0:
        ends.load_mma_K.wait_full(0, 0)
        ends.load_mma_Q.wait_full(q.index, q.phase)
        issue_scores(context, ends, places, q.index)
        ends.load_mma_V.wait_full(0, 0)
        for i in cutlass.range(work.steps, unroll=1):
            ends.load_mma_dO.wait_full(do.index, do.phase)
            if cutlass.const_expr(cfg.dq_over_dp):
                ends.mma_reduce_dQ.wait_free(0, phase ^ 1)
            do_place = places["dO"] + do.index * cfg.do_tile.nbytes
            with cute.arch.elect_one():
                cfg.dp.issue(spans.dP, cfg.dp.a.at(places["V"]), cfg.dp.b.at(do_place), False)
                ends.mma_compute_dP.commit_full(0)

            ends.compute_mma_P.wait_full(0, phase)
            with cute.arch.elect_one():
                issue_by_halves(cfg.dv, spans.dV, spans.P, cfg.dv.b.at(do_place), i > 0)
                ends.load_mma_dO.commit_free(do.index)
            do = do.next()

            stage = q.index
            q = q.next()
            if i + 1 < work.steps:
                ends.load_mma_Q.wait_full(q.index, q.phase)
                issue_scores(context, ends, places, q.index)
            else:
                with cute.arch.elect_one():
                    ends.mma_compute_dV.commit_full(0)

            ends.compute_mma_dS.wait_full(0, phase)
            with cute.arch.elect_one():
                q_place = places["Q"] + stage * cfg.q_tile.nbytes
                issue_by_halves(cfg.dk, spans.dK, spans.dS, cfg.dk.b.at(q_place), i > 0)
                ends.load_mma_Q.commit_free(stage)
            if cutlass.const_expr(not cfg.dq_over_dp):
                ends.mma_reduce_dQ.wait_free(0, phase ^ 1)
            with cute.arch.elect_one():
                issue_dq(context, places)
                ends.mma_reduce_dQ.commit_full(0)
                ends.compute_mma_dS.commit_free(0)
            phase = phase ^ 1
        with cute.arch.elect_one():
            ends.mma_compute_dK.commit_full(0)


def issue_scores(context, ends, places, stage):
    """S^T of the Q tile in `stage`."""
    scores = context.cfg.scores
    q_place = places["Q"] + stage * context.cfg.q_tile.nbytes
    with cute.arch.elect_one():
        scores.issue(context.tmem.S, scores.a.at(places["K"]), scores.b.at(q_place), False)
        ends.mma_compute_S.commit_full(0)


def issue_by_halves(umma, d, a, b, accumulate):
    """D += A B, A from tensor memory: each compute warpgroup has put its half of the reduction, packed, at the first
    columns of its own half of the scores."""
    steps = umma.steps // HALVES
    for half in range(HALVES):
        gap = half * (umma.k // HALVES - steps * K_PER_MMA // 2)  # columns that packing left unused before this half
        umma.issue(d, a + gap, b, accumulate, range(half * steps, (half + 1) * steps))


def issue_dq(context, places):
    """dQ, or dQ^T: its first LANES rows, then the rest over dP."""
    cfg, spans = context.cfg, context.tmem
    if not cfg.dq_transposed:
        cfg.dq.issue(spans.dQ, cfg.dq.a.at(places["dS"]), cfg.dq.b.at(places["K"]), False)
        return
    low, high = cfg.dq_transpose(LANES), cfg.dq_transpose(cfg.columns - LANES)
    ds = low.b.at(places["dS"])
    low.issue(spans.dQ, low.a.at(places["K"]), ds, False)
    high_columns = places["K"] + LANES // PANEL_COLUMNS * cfg.k_tile.panel_bytes
    high.issue(spans.dQ_high, high.a.at(high_columns), ds, False)
