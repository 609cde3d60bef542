"""Consumer of the compute role: its operands and accumulators, and its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ...core.constant import Constant
from ...pipeline.cursor import Cursor, consume
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..wgmma import ROWS
from ..wgmma_order import wait
from .common.config import CONSUMERS
from .common.pointwise import Statistic, fill, rows_of, store_ds
from .common.work import Sm90BackwardWork, StepCoord
from .config import Division
from .context import Sm90BackwardContext
from .dq_cursor import DqCursor
from .epilogue import stage_gradients
from .last_dq import block_before, stage_dq
from .pointwise import clear_ds, compute_ds, compute_p, pack_p, step_scores


class Cursors(NamedTuple):
    """A consumer's cursors before a step. last_ds: of the step before. last_dq: of the step before that."""

    q: Cursor
    do: Cursor
    ds: Cursor
    last_ds: Cursor
    last_dq: DqCursor

    def after_first(self) -> Cursors:
        """Return the cursors of the second step, before which no dQ has been computed."""
        return self._replace(q=self.q.next(), do=self.do.next(), ds=self.ds.next())

    def next(self) -> Cursors:
        """Return the cursors of the next step."""
        return Cursors._make(cursor.next() for cursor in self)


class StepOperands(Constant):
    """Operands of the products of a step, of all its queries or of half of them (`Sm90BackwardConfig.half`)."""

    def __init__(self, context: Sm90BackwardContext, own_rows: Int32):
        cfg = context.cfg
        self.context, self.cfg = context, cfg

        def ptr(name: str, offset=0) -> cute.Pointer:
            return context.smem.pointer(name, cfg.dtype) + offset

        self.k, self.v = cfg.scores.a_at(ptr("K", own_rows)), cfg.dp.a_at(ptr("V", own_rows))
        self.q, self.do = cfg.scores.b_at(ptr("Q")), cfg.dp.b_at(ptr("dO"))
        self.q_columns, self.do_columns = cfg.dk.b_at(ptr("Q")), cfg.dv.b_at(ptr("dO"))


class BackwardConsumer(Constant):
    """Consumer, created once: channels, operands of the products, dV and dK accumulators, and its steps."""

    def __init__(self, context: Sm90BackwardContext):
        cfg = context.cfg
        self.context, self.cfg, self.ends = context, cfg, context.ends("compute")
        self.index = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_PER_WARPGROUP

        def ptr(name: str, offset=0) -> cute.Pointer:
            return context.smem.pointer(name, cfg.dtype) + offset

        own_rows = self.index * (ROWS * PANEL_ROW_BYTES // 2)
        if cfg.division is Division.COLUMNS:
            panel, queries = cfg.k_tile.panel_bytes // 2, cfg.tile_m // CONSUMERS * (PANEL_ROW_BYTES // 2)
            each, odd = divmod(cfg.k_tile.panels, CONSUMERS)
            panels = [self.index * (each * panel) + i * panel for i in range(each)] + [CONSUMERS * each * panel] * odd
            starts = [0] * each + [self.index * queries] * odd
            self.dq_a = [product.a_at(ptr("K", start)) for product, start in zip(cfg.dq, panels)]
            self.dq_b = [product.b_at(ptr("dS", start)) for product, start in zip(cfg.dq, starts)]
        else:
            self.dq_a, self.dq_b = [cfg.dq[0].a_at(ptr("dS", own_rows))], [cfg.dq[0].b_at(ptr("K"))]
        self.whole = StepOperands(context, own_rows)
        self.half = StepOperands(replace(context, cfg=cfg.half), own_rows) if cfg.halves_steps else None
        self.dv, self.dk = cfg.dv.accumulator(), cfg.dk.accumulator()

    def start_dq(self, ds: Cursor, products: slice) -> list[cute.Tensor]:
        """Start some products of this consumer's share of dQ. Returns their accumulators."""
        of_a, of_b = (0, ds.stage) if self.cfg.division is Division.COLUMNS else (ds.stage, 0)
        dq = [product.accumulator() for product in self.cfg.dq[products]]
        for product, d, a, b in zip(self.cfg.dq[products], dq, self.dq_a[products], self.dq_b[products]):
            product.issue(d, a[None, None, None, of_a], b[None, None, None, of_b], False)
        return dq

    def stage_dq(self, work: Sm90BackwardWork, m_block: Int32, last_dq: DqCursor, dq: list[cute.Tensor]) -> None:
        """Stage the dQ of a step for the reduce warps. m_block: its query block. last_dq: cursor of the step before."""
        if self.cfg.last_finishes:
            stage_dq(self.context, work, m_block, self.index, last_dq, dq[0])
        else:
            last_dq.store(self.context, self.index, dq)
        last_dq.next().arrive(self.index)

    def step(
        self,
        work: Sm90BackwardWork,
        coord: StepCoord,
        cursors: Cursors,
        is_partial: bool,
        has_dq: bool,
        is_first: bool,
        query_half: Int32 | None = None,
    ) -> None:
        """Run one step on a block of queries. coord: (query head of the group, step). is_partial: some query may miss
        some key. has_dq: compute dQ of the step before here. query_half: which half of the queries; None for all.
        No other query sees a key of this consumer, so its dS of the others is zero."""
        of, (q, do, ds, last_ds, last_dq) = self.whole if query_half is None else self.half, cursors
        context, cfg, own = of.context, of.cfg, work
        q_stage, do_stage, block, first_row = q.stage, do.stage, coord, 0
        if query_half is not None:
            q_stage, do_stage = (CONSUMERS * cursor.stage + query_half for cursor in (q, do))
            block, first_row = (coord[0], CONSUMERS * coord[1] + query_half), query_half * ROWS
            own = work._replace(mask=replace(work.mask, tile_m=ROWS))
        s, dp = cfg.scores.accumulator(), cfg.dp.accumulator()
        q.wait()
        cfg.scores.issue(s, of.k[None, None, None, 0], of.q[None, None, None, q_stage], False)
        if is_first:
            consume(self.ends.load_compute_V).wait()
        do.wait()
        cfg.dp.issue(dp, of.v[None, None, None, 0], of.do[None, None, None, do_stage], False)
        scores = step_scores(context, own, block, is_partial)
        rows = rows_of(self.context, q.stage) + first_row
        minus_lse = Statistic(rows, cfg)

        wait(1)
        p = compute_p(context, s, minus_lse, scores)
        minus_delta = Statistic(rows + self.cfg.tile_m, cfg)
        ds.wait()  # here: keeps the compiler from moving exp2 behind the wait for dP
        wait(0)
        p_operand, ds_operand = cfg.dv.a_registers(), cfg.dk.a_registers()
        fill(p_operand, pack_p(context, p, scores))
        packed_ds = compute_ds(context, s, p, minus_delta, dp, scores)
        fill(ds_operand, packed_ds)

        if query_half is None:
            store_ds(context, ds.stage, self.index, packed_ds)
        else:  # a panel of the step as a tile of two halves
            store_ds(context, CONSUMERS * ds.stage + self.index, query_half, packed_ds)
            clear_ds(context, CONSUMERS * ds.stage + self.index, 1 - query_half)
        cfg.dv.issue(self.dv, p_operand, of.do_columns[None, None, None, do_stage], True)
        ds.arrive()
        if has_dq:
            last_ds.wait()
            dq = self.start_dq(last_ds, slice(1))
            wait(1)
            do.arrive()
            dq += self.start_dq(last_ds, slice(1, None))  # not earlier: they use the registers of P
            cfg.dk.issue(self.dk, ds_operand, of.q_columns[None, None, None, q_stage], True)
            wait(1)
            last_ds.arrive()
            self.stage_dq(work, block_before(work, coord), last_dq, dq)
        else:
            cfg.dk.issue(self.dk, ds_operand, of.q_columns[None, None, None, q_stage], True)
            wait(1)
            do.arrive()
        wait(0)
        cute.arch.sync_warp()  # every lane has read the statistics that came with Q before one lane arrives
        q.arrive()

    def skip(self, cursors: Cursors, has_dq: bool) -> None:
        """Run one step whose queries see none of this consumer's keys: its dS is zero. has_dq: see `step`."""
        q, do, ds, last_ds, last_dq = cursors
        q.wait()
        if not has_dq:
            consume(self.ends.load_compute_V).wait()
        do.wait()
        ds.wait()
        clear_ds(self.context, ds.stage, self.index)
        ds.arrive()
        if has_dq:
            last_ds.wait()
            dq = self.start_dq(last_ds, slice(None))
            wait(0)
            last_ds.arrive()
            last_dq.store(self.context, self.index, dq)
            last_dq.next().arrive(self.index)
        do.arrive()
        q.arrive()

    def finish(self, work: Sm90BackwardWork, cursors: Cursors) -> None:
        """Compute dQ of the last step; meanwhile dV and dK leave the registers."""
        cursors.last_ds.wait()
        dq = self.start_dq(cursors.last_ds, slice(None))
        stage_gradients(self.context, work, self)
        wait(0)
        self.stage_dq(work, work.stop - 1, cursors.last_dq, dq)
