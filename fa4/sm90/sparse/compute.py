"""Compute roles, one warpgroup each: dV or dK of every block, and P, dS and dQ of 64 rows, see `kernel`.

Waits:   add_dV_all_start.full, gather_both_{Q,K}.full, gather_scores_V.full, scores_dV_P.{free,full},
         scores_dQ_dS.{free,full}, dV_add_dV.free, dK_add_dK.free
Signals: gather_both_K.free, gather_scores_V.free, scores_dV_P.{full,free}, scores_dQ_dS.{full,free},
         dV_add_dV.full, dK_add_dK.full
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...bwd.device.list_work import SparseWork, work_tile
from ...core.constant import Constant
from ...core.vec_io import bits, store_vec
from ...pipeline.cursor import Cursor, consume, produce
from ...pipeline.fragment import first_column, row_in_warp, store_matrices
from ...pipeline.roles import ROWS_PER_WARP, WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..bwd.common.pointwise import pack
from ..wgmma import ROWS
from ..wgmma_order import wait
from .config import TILE_N
from .context import Sm90SparseContext
from .front import start_block
from .rows import RowStatistics, store_dq


@cute.jit
def dv(context: Sm90SparseContext):
    run(context, "dV")


@cute.jit
def dk(context: Sm90SparseContext):
    run(context, "dK")


class Cursors(NamedTuple):
    """A role's cursors before a step: of its block of K, of the next block of V, of its P and dS, of its gradient."""

    k: Cursor
    v: Cursor
    p: Cursor
    ds: Cursor
    staged: Cursor

    def next(self) -> Cursors:
        return Cursors._make(cursor.next() for cursor in self)


class SparseConsumer(Constant):
    """Operands and accumulators of a compute role, created once."""

    def __init__(self, context: Sm90SparseContext, role: str, work: SparseWork) -> None:
        cfg, self.ends = context.cfg, context.ends(role)
        self.context, self.cfg, self.role, self.work = context, cfg, role, work
        self.has_scores, self.has_dq = cfg.has_scores(role), cfg.has_dq(role)
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        tile_row = ROWS if role == "dK" and self.has_scores else 0  # of this warpgroup's first row
        self.first = work.first + tile_row + self.warp * ROWS_PER_WARP
        self.row_bytes = (tile_row + self.warp * ROWS_PER_WARP) * PANEL_ROW_BYTES

        def ptr(name: str) -> cute.Pointer:
            return context.smem.pointer(name, cfg.dtype)

        own = tile_row * (PANEL_ROW_BYTES // 2)
        self.gradient = cfg.dv if role == "dV" else cfg.dk
        self.a = self.gradient.a_at(ptr("P" if role == "dV" else "dS"))
        self.b = self.gradient.b_at(ptr("dO" if role == "dV" else "Q"))
        self.staged = self.ends.dV_add_dV if role == "dV" else self.ends.dK_add_dK
        self.total = self.gradient.accumulator()
        if self.has_scores:
            self.q, self.k = cfg.scores.a_at(ptr("Q") + own), cfg.scores.b_at(ptr("K"))
            self.do, self.v = cfg.dp.a_at(ptr("dO") + own), cfg.dp.b_at(ptr("V"))
            self.s, self.dp = cfg.scores.accumulator(), cfg.dp.accumulator()
        if self.has_dq:
            self.ds, self.k_columns = cfg.dq.a_at(ptr("dS") + own), cfg.dq.b_at(ptr("K"))
            self.dq = cfg.dq.accumulator()

    def cursors(self) -> Cursors:
        """Return the cursors of the first block. Of channels that the role has no end of, any."""
        ends = self.ends
        k, staged = consume(ends.gather_both_K), produce(self.staged)
        v = consume(ends.gather_scores_V) if self.has_scores else k
        p = consume(ends.scores_dV_P) if self.role == "dV" else produce(ends.scores_dV_P) if self.has_scores else k
        ds = consume(ends.scores_dQ_dS) if self.has_dq else produce(ends.scores_dQ_dS)
        return Cursors(k, v, p, ds, staged)

    def start_scores(self, k: Cursor) -> None:
        """Start S of a block."""
        k.wait()
        stage = self.k[None, None, None, k.stage]
        self.cfg.scores.issue(self.s, self.q[None, None, None, 0], stage, False)

    def start_dp(self, v: Cursor) -> None:
        """Start dP of a block."""
        v.wait()
        self.cfg.dp.issue(self.dp, self.do[None, None, None, 0], self.v[None, None, None, v.stage], False)

    def compute_p(self, rows: RowStatistics, block: Int32) -> None:
        """Replace S by P; P of keys past the end of the list is 0. block: see `run`."""
        of_last = self.work.count - (self.work.blocks(self.context) - 1) * TILE_N
        limit = Int32(cutlass.select_(block == 0, of_last, TILE_N)) - first_column()
        for i in range(cute.size(self.s)):
            exponent = self.s[i] * self.context.args.scale_log2 + rows.minus_lse[i // 2 % 2]
            exponent = cutlass.select_(Int32(i // 4 * 8 + i % 2) < limit, exponent, -Float32.inf)
            self.s[i] = cute.math.exp2(Float32(exponent), fastmath=True)

    def compute_ds(self, rows: RowStatistics) -> None:
        """Replace dP by dS."""
        for i in range(cute.size(self.s)):
            self.dp[i] = self.s[i] * (self.dp[i] + rows.minus_delta[i // 2 % 2])

    def store_scores(self, cursors: Cursors) -> None:
        """Store P and dS of a block. cursors: of that block."""
        for name, cursor, end, x in (
            ("P", cursors.p, self.ends.scores_dV_P, self.s),
            ("dS", cursors.ds, self.ends.scores_dQ_dS, self.dp),
        ):
            to_fill = cursor if cursor.produces else cursor.at_iteration_of(produce(end))
            to_fill.wait()
            address = self.context.smem.address(name) + self.row_bytes
            store_matrices(address, self.cfg.p_tile, packed(x, self.cfg.dtype))
            to_fill.arrive()

    def start_gradients(self, cursors: Cursors) -> None:
        """Start dQ, and dV or dK, of a block."""
        cfg = self.cfg
        if self.has_dq:
            cursors.ds.wait()
            if not self.has_scores:
                cursors.k.wait()
            ds, k = self.ds[None, None, None, 0], self.k_columns[None, None, None, cursors.k.stage]
            cfg.dq.issue(self.dq, ds, k, True)
        if self.role == "dV":
            cursors.p.wait()
        self.gradient.issue(self.total, self.a[None, None, None, 0], self.b[None, None, None, 0], False)

    def stage_gradient(self, staged: Cursor) -> None:
        """Store the block's dV or dK, as float32, to shared memory."""
        stride = self.cfg.sum_row_bytes(self.gradient.n) // 4
        factor = self.context.args.scale if self.role == "dK" else None
        staged.wait()
        first = self.context.smem.pointer(self.role, Float32)
        for r in range(2):
            row = (self.warp * ROWS_PER_WARP + row_in_warp(r)) * stride + first_column()
            for pair in range(self.gradient.n // 8):
                values = [self.total[4 * pair + 2 * r + i] for i in range(2)]
                values = values if factor is None else [x * factor for x in values]
                store_vec(first + (row + 8 * pair), [bits(x) for x in values])
        staged.arrive()

    def step(self, rows: RowStatistics, cursors: Cursors, following: Int32 | None) -> None:
        """Compute the gradients of a block; also P and dS of the following one, if there is one."""
        has_scores, after = self.has_scores and following is not None, cursors.next()
        if has_scores:
            self.start_scores(after.k)
        self.start_gradients(cursors)
        if has_scores:
            self.start_dp(after.v)
            wait(2 + self.has_dq)
            self.compute_p(rows, following)
        wait(1 if has_scores else 0)
        cursors.k.arrive()
        if self.role == "dV":
            cursors.p.arrive()
        if self.has_dq:
            cursors.ds.arrive()
        self.stage_gradient(cursors.staged)
        if has_scores:
            wait(0)
            after.v.arrive()
            self.compute_ds(rows)
            self.store_scores(after)


def packed(x: cute.Tensor, dtype: type[cutlass.Numeric]) -> list[Int32]:
    return pack([x[i] for i in range(cute.size(x))], dtype)


@cute.jit
def run(context: Sm90SparseContext, role: cutlass.Constexpr[str]):
    """Blocks are counted from the last one of the list, which is 0: this takes the fewest registers."""
    work = work_tile(context)
    consumer = SparseConsumer(context, role, work)
    if const_expr(consumer.has_dq):
        consumer.dq.fill(0.0)
    if work.count > 0:
        rows = None
        if const_expr(consumer.has_scores):
            rows = RowStatistics.of(context, work, consumer.first)
        cursors = consumer.cursors()
        start = start_block(context, consumer.ends)
        consume(consumer.ends.gather_both_Q).wait()
        if const_expr(consumer.has_scores):
            consumer.start_scores(cursors.k)
            consumer.start_dp(cursors.v)
            wait(1)
            consumer.compute_p(rows, start + 1 - work.blocks(context))
            wait(0)
            cursors.v.arrive()
            consumer.compute_ds(rows)
            consumer.store_scores(cursors)
        for block in cutlass.range(start + 2 - work.blocks(context), start + 1, unroll=1):
            consumer.step(rows, cursors, block)
            cursors = cursors.next()
        consumer.step(rows, cursors, None)
    if const_expr(consumer.has_dq):
        store_dq(context, work, consumer.first, consumer.dq)
