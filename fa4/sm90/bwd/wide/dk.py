"""dK role, one consumer: dS of each step from P of the dV role, dK of all steps, some columns of dQ of each step.

Waits:   load_compute_{K,V,Q,dO}.full, dV_dK_P.full, dK_compute_dS.{free,full}
Signals: dV_dK_P.free, load_compute_{Q,dO}.free, dK_compute_dS.{full,free}
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32

from ....pipeline.cursor import consume, produce
from ...wgmma_order import wait
from ..common.pointwise import Statistic, fill, pack, query_of, rows_of, store_ds
from ..common.work import Sm90BackwardWork, StepCoord, work_tile
from .config import WEIGHT_EXPONENT
from .context import Sm90WideContext
from .exchange import dropout_factors, load_p, send_ds
from .steps import Cursors, WideConsumer, all_steps, store_gradient


@cute.jit
def dk(context: Sm90WideContext):
    work, consumer = work_tile(context), DkConsumer(context)
    consumer.total.fill(0.0)
    if work.blocks > 0:
        consume(consumer.ends.load_compute_K).wait()
        consumer.share.wait_peer_keys()
        consume(consumer.ends.load_compute_V).wait()
        cute.arch.griddepcontrol_wait()  # the statistics kernel clears the dQ sums
        all_steps(context, consumer, work, consume(consumer.ends.dV_dK_P))
    store_gradient(context, consumer, work, "dk", context.args.scale)


class DkConsumer(WideConsumer):
    """Consumer of V, dO and Q."""

    applies_mask = False

    def __init__(self, context: Sm90WideContext):
        cfg, ptr = context.cfg, context.smem.pointer
        self.v, self.do = cfg.dp.a_at(ptr("V", cfg.dtype)), cfg.dp.b_at(ptr("dO", cfg.dtype))
        self.q_columns = cfg.dk.b_at(ptr("Q", cfg.dtype))
        super().__init__(context, "dK", 1, cfg.dk)

    def release(self, cursors: Cursors) -> None:
        cute.arch.sync_warp()  # as in `dv`
        cursors.q.arrive()

    def step(self, work: Sm90BackwardWork, coord: StepCoord, cursors: Cursors, is_partial: bool, has_dq: bool) -> None:
        """P includes the mask and, in its sign, dropout."""
        context, cfg, ends = self.context, self.context.cfg, self.ends
        dp = cfg.dp.accumulator()
        cursors.do.wait()
        cfg.dp.issue(dp, self.v[None, None, None, 0], self.do[None, None, None, cursors.do.stage], False)
        cursors.q.wait()
        minus_delta = Statistic(rows_of(context, cursors.q.stage) + cfg.tile_m, cfg)
        ds = cursors.p.at_iteration_of(produce(ends.dK_compute_dSother if cfg.ctas == 2 else ends.dK_compute_dS))
        cursors.p.wait()
        p = load_p(context, cursors.p.stage, cute.size(dp))
        ds.wait()
        wait(0)
        shrink = Float32(2.0**-WEIGHT_EXPONENT)  # P is larger by the inverse; -delta is scaled likewise
        if cfg.has_dropout:
            factors = dropout_factors(p, context.args.mods.dropout.scale * shrink)
            p = [cute.arch.fmax(x, -x) for x in p]
        else:
            factors = [shrink] * len(p)
        packed_ds = pack([x * (dp[i] * factors[i] + minus_delta[query_of(i)]) for i, x in enumerate(p)], cfg.dtype)
        cursors.do.arrive()
        cursors.p.arrive()
        store_ds(context, ds.stage, 0, packed_ds)
        ds_operand = cfg.dk.a_registers()
        fill(ds_operand, packed_ds)
        cfg.dk.issue(self.total, ds_operand, self.q_columns[None, None, None, cursors.q.stage], True)
        cursors.p.at_iteration_of(produce(ends.dK_compute_dS)).arrive()
        if cfg.ctas == 2:
            send_ds(context, ds)
        self.finish_step(work, cursors, has_dq)
