"""Operands and accumulators of a consumer of the compute role."""

from __future__ import annotations

import cutlass.cute as cute

from ...core.constant import Constant
from ...pipeline.cursor import Cursor
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..wgmma import ROWS
from .common.config import CONSUMERS
from .config import Division
from .context import Sm90BackwardContext


class BackwardConsumer(Constant):
    """Channels, operands of the products, and the dV and dK accumulators of a consumer, created once."""

    def __init__(self, context: Sm90BackwardContext):
        cfg = context.cfg
        self.cfg, self.ends = cfg, context.ends("compute")
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
        self.k, self.v = cfg.scores.a_at(ptr("K", own_rows)), cfg.dp.a_at(ptr("V", own_rows))
        self.q, self.do = cfg.scores.b_at(ptr("Q")), cfg.dp.b_at(ptr("dO"))
        self.q_columns, self.do_columns = cfg.dk.b_at(ptr("Q")), cfg.dv.b_at(ptr("dO"))
        self.dv, self.dk = cfg.dv.accumulator(), cfg.dk.accumulator()

    def start_dq(self, ds: Cursor, products: slice) -> list[cute.Tensor]:
        """Start some products of this consumer's share of dQ. Returns their accumulators."""
        of_a, of_b = (0, ds.stage) if self.cfg.division is Division.COLUMNS else (ds.stage, 0)
        dq = [product.accumulator() for product in self.cfg.dq[products]]
        for product, d, a, b in zip(self.cfg.dq[products], dq, self.dq_a[products], self.dq_b[products]):
            product.issue(d, a[None, None, None, of_a], b[None, None, None, of_b], False)
        return dq
