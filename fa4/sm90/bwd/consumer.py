"""Operands and accumulators of a consumer of the compute role."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

from ...core.constant import Constant
from ...pipeline.cursor import Cursor
from ...pipeline.ends import Ends
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..wgmma import ROWS
from .config import CONSUMERS, Division, Sm90BackwardConfig


@dataclass(frozen=True)
class BackwardConsumer(Constant):
    """Channels, operands of the products, and the dV and dK accumulators."""

    cfg: Sm90BackwardConfig
    ends: Ends
    index: Int32
    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    q_columns: cute.Tensor
    do_columns: cute.Tensor
    dq_a: list[cute.Tensor]
    dq_b: list[cute.Tensor]
    dv: cute.Tensor
    dk: cute.Tensor

    def start_scores(self, s: cute.Tensor, q: Cursor) -> None:
        """Start S^T = K Q^T."""
        self.cfg.scores.issue(s, self.k[None, None, None, 0], self.q[None, None, None, q.stage], False)

    def start_dp(self, dp: cute.Tensor, do: Cursor) -> None:
        """Start dP^T = V dO^T."""
        self.cfg.dp.issue(dp, self.v[None, None, None, 0], self.do[None, None, None, do.stage], False)

    def add_dv(self, p: cute.Tensor, do: Cursor) -> None:
        """Start dV += P^T dO."""
        self.cfg.dv.issue(self.dv, p, self.do_columns[None, None, None, do.stage], True)

    def add_dk(self, ds: cute.Tensor, q: Cursor) -> None:
        """Start dK += dS^T Q."""
        self.cfg.dk.issue(self.dk, ds, self.q_columns[None, None, None, q.stage], True)

    def start_dq(self, ds: Cursor, products: slice) -> list[cute.Tensor]:
        """Start some products of this consumer's share of dQ. Returns their accumulators."""
        of_a, of_b = (0, ds.stage) if self.cfg.division is Division.COLUMNS else (ds.stage, 0)
        dq = [product.accumulator() for product in self.cfg.dq[products]]
        for product, d, a, b in zip(self.cfg.dq[products], dq, self.dq_a[products], self.dq_b[products]):
            product.issue(d, a[None, None, None, of_a], b[None, None, None, of_b], False)
        return dq


def consumer_of(context) -> BackwardConsumer:
    """Return the operands and accumulators of this consumer."""
    cfg = context.cfg
    index = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_PER_WARPGROUP

    def ptr(name: str, offset=0) -> cute.Pointer:
        return context.smem.pointer(name, cfg.dtype) + offset

    own_rows = index * (ROWS * PANEL_ROW_BYTES // 2)
    if cfg.division is Division.COLUMNS:
        panel, queries = cfg.k_tile.panel_bytes // 2, cfg.tile_m // CONSUMERS * (PANEL_ROW_BYTES // 2)
        each, odd = divmod(cfg.k_tile.panels, CONSUMERS)
        panels = [index * (each * panel) + i * panel for i in range(each)] + [CONSUMERS * each * panel] * odd
        dq_a = [product.a_at(ptr("K", start)) for product, start in zip(cfg.dq, panels)]
        dq_b = [product.b_at(ptr("dS", start)) for product, start in zip(cfg.dq, [0] * each + [index * queries] * odd)]
    else:
        dq_a, dq_b = [cfg.dq[0].a_at(ptr("dS", own_rows))], [cfg.dq[0].b_at(ptr("K"))]
    return BackwardConsumer(
        cfg=cfg,
        ends=context.ends("compute"),
        index=index,
        k=cfg.scores.a_at(ptr("K", own_rows)),
        v=cfg.dp.a_at(ptr("V", own_rows)),
        q=cfg.scores.b_at(ptr("Q")),
        do=cfg.dp.b_at(ptr("dO")),
        q_columns=cfg.dk.b_at(ptr("Q")),
        do_columns=cfg.dv.b_at(ptr("dO")),
        dq_a=dq_a,
        dq_b=dq_b,
        dv=cfg.dv.accumulator(),
        dk=cfg.dk.accumulator(),
    )
