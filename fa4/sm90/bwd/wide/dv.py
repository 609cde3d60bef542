"""dV role, one consumer: P of each step for itself and the dK role, dV of all steps, some columns of dQ of each step.
The row statistics scale P by 2^WEIGHT_EXPONENT; the store of dV removes the factor.

Waits:   load_compute_{K,Q,dO}.full, dV_dK_P.free, dK_compute_dS.full
Signals: dV_dK_P.full, load_compute_{Q,dO}.free, dK_compute_dS.free
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, const_expr

from ....core.dropout import apply_dropout
from ....core.scoring import Scoring
from ....pipeline.cursor import consume, produce
from ...wgmma_order import wait
from ..common.pointwise import Statistic, fill, keep_bits_at, p_of, pack, query_bounds, rows_of
from ..common.work import Sm90BackwardWork, StepCoord, work_tile
from .config import WEIGHT_EXPONENT
from .context import Sm90WideContext
from .exchange import sign_dropped, store_p
from .steps import Cursors, WideConsumer, all_steps, store_gradient


@cute.jit
def dv(context: Sm90WideContext):
    work, consumer = work_tile(context), DvConsumer(context)
    consumer.total.fill(0.0)
    if work.blocks > 0:
        consume(consumer.ends.load_compute_K).wait()
        consumer.share.wait_peer_keys()
        cute.arch.griddepcontrol_wait()  # the statistics kernel clears the dQ sums
        all_steps(context, consumer, work, produce(consumer.ends.dV_dK_P))
    scale = Float32(2.0**-WEIGHT_EXPONENT)
    if const_expr(context.cfg.has_dropout):
        scale = scale * context.args.mods.dropout.scale
    store_gradient(context, consumer, work, "dv", scale)


class DvConsumer(WideConsumer):
    """Consumer of K, Q and dO."""

    applies_mask = True

    def __init__(self, context: Sm90WideContext):
        cfg, ptr = context.cfg, context.smem.pointer
        self.k, self.q = cfg.scores.a_at(ptr("K", cfg.dtype)), cfg.scores.b_at(ptr("Q", cfg.dtype))
        self.do_columns = cfg.dv.b_at(ptr("dO", cfg.dtype))
        super().__init__(context, "dV", 0, cfg.dv)

    def release(self, cursors: Cursors) -> None:
        cursors.do.arrive()

    def step(self, work: Sm90BackwardWork, coord: StepCoord, cursors: Cursors, is_partial: bool, has_dq: bool) -> None:
        context, cfg, (head, m_block) = self.context, self.context.cfg, coord
        s = cfg.scores.accumulator()
        cursors.q.wait()
        cfg.scores.issue(s, self.k[None, None, None, 0], self.q[None, None, None, cursors.q.stage], False)
        bounds = query_bounds(work, m_block) if is_partial else None
        keep_bits = keep_bits_at(context, work, head, m_block)
        cursors.p.wait()
        wait(0)
        p, p_for_ds = compute_p(context, s, Statistic(rows_of(context, cursors.q.stage), cfg), bounds)
        if keep_bits is not None:
            p_for_ds = sign_dropped(p_for_ds, keep_bits)
            p = [apply_dropout(*keep_bits.bit(i), x) for i, x in enumerate(p)]
        store_p(context, cursors.p.stage, p_for_ds)
        cursors.p.arrive()
        p_operand = cfg.dv.a_registers()
        fill(p_operand, pack(p, cfg.dtype))
        cursors.do.wait()
        cfg.dv.issue(self.total, p_operand, self.do_columns[None, None, None, cursors.do.stage], True)
        cute.arch.sync_warp()  # every lane has read the statistics that came with Q before one lane arrives
        cursors.q.arrive()
        self.finish_step(work, cursors, has_dq)


def compute_p(
    context: Sm90WideContext, s: cute.Tensor, minus_lse: Statistic, bounds
) -> tuple[list[Float32], list[Float32]]:
    """Return P^T, and P^T times the derivative of the softcap. Replaces `s` by the logits."""
    over_cap = context.args.scale_over_cap if context.cfg.has_softcap else None
    scoring, elements = Scoring(over_cap), range(cute.size(s))
    (logits,) = scoring.logits([[s[i] for i in elements]])
    for i in elements:
        s[i] = logits[i]
    p = p_of(context, [s[i] for i in elements], minus_lse, bounds)
    return p, scoring.times_softcap_grad([p], [[s[i] for i in elements]])[0]
