"""dV role, one warpgroup: P of each step, handed to the other one; dV of all steps; some columns of each step's dQ.

Waits:   load_compute_{K,Q,dO}.full, dV_dK_P.free, dK_compute_dS.full
Signals: dV_dK_P.full, load_compute_{Q,dO}.free, dK_compute_dS.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from ....core.score import Softcap
from ....core.words import store_words
from ....pipeline.cursor import Cursor, consume, produce
from ...wgmma import wait
from ..epilogue import store_gradient
from ..placement import WARPGROUP
from ..pointwise import Statistic, fill, rounded, rows_of, seen_by_key, weights
from ..work import work_tile
from .share import Share


@cute.jit
def dv(context):
    cfg, ends = context.cfg, context.ends("dV")
    work = work_tile(context)
    total = cfg.dv.accumulator()
    total.fill(0.0)
    if work.blocks > 0:
        consume(ends.load_compute_K).wait()
    cute.arch.griddepcontrol_wait()  # the sums of dQ are cleared by another kernel
    operands = Operands(context)
    q, do = consume(ends.load_compute_Q), consume(ends.load_compute_dO)
    p = produce(ends.dV_dK_P)
    for member in cutlass.range(cfg.group, unroll=1):
        head = work.head_kv * cfg.group + member
        for m_block in cutlass.range(work.first, work.full_first, unroll=1):
            step(context, operands, total, work, m_block, head, q, do, p, True)
            q, do, p = q.next(), do.next(), p.next()
        for m_block in cutlass.range(work.full_first, work.full_stop, unroll=1):
            step(context, operands, total, work, m_block, head, q, do, p, False)
            q, do, p = q.next(), do.next(), p.next()
        if cutlass.const_expr(cfg.has_left):
            for m_block in cutlass.range(work.full_stop, work.stop, unroll=1):
                step(context, operands, total, work, m_block, head, q, do, p, True)
                q, do, p = q.next(), do.next(), p.next()
    store_gradient(context, work, "V", "dv", total, Float32(1.0), 0)


class Operands:
    """Left and right operands of the products, made once."""

    def __init__(self, context):
        cfg, place = context.cfg, context.smem.pointer
        self.k, self.q = cfg.scores.a_at(place("K", cfg.dtype)), cfg.scores.b_at(place("Q", cfg.dtype))
        self.do_columns = cfg.dv.b_at(place("dO", cfg.dtype))
        self.share = Share(context, 0)


@cute.jit
def step(
    context,
    operands: cutlass.Constexpr[Operands],
    total: cute.Tensor,
    work,
    m_block: Int32,
    head: Int32,
    q: Cursor,
    do: Cursor,
    p_cursor: Cursor,
    is_cut: cutlass.Constexpr[bool],
):
    """One block of queries."""
    cfg, ends, args = context.cfg, context.ends("dV"), context.args
    s = cfg.scores.accumulator()
    q.wait()
    cfg.scores.issue(s, operands.k[None, None, None, 0], operands.q[None, None, None, q.stage], False)
    bounds = seen_by_key(work, m_block) if cutlass.const_expr(is_cut) else None
    p_cursor.wait()
    wait(0)
    p = weights(context, s, Statistic(rows_of(context, q.stage), cfg), bounds)
    handed = p
    if cutlass.const_expr(cfg.has_softcap):
        # s holds what the softcap made of the scores.
        handed = [x * Softcap(args.scale_over_cap).slope(s[i]) for i, x in enumerate(p)]
    hand_over(context, p_cursor.stage, rounded(handed, Float16))
    p_cursor.arrive()
    p_operand = cfg.dv.a_registers()
    fill(p_operand, rounded(p, cfg.dtype))
    do.wait()
    cfg.dv.issue(total, p_operand, operands.do_columns[None, None, None, do.stage], True)
    q.arrive()
    ds = p_cursor.in_step(consume(ends.dK_compute_dS))
    ds.wait()
    dq = operands.share.start(ds)
    wait(1)
    do.arrive()
    wait(0)
    ds.arrive()
    operands.share.add(context, work, m_block, head, dq)


def hand_over(context, stage: Int32, words: list[Int32]) -> None:
    """P to shared memory: four words of every thread, then the next four."""
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    place = context.smem.pointer("P", Int32) + stage * (context.cfg.p_bytes // 4) + 4 * thread
    for i in range(0, len(words), 4):
        store_words(place + i * WARPGROUP, words[i : i + 4])
