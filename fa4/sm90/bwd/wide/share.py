"""A warpgroup's columns of dQ: from the product to the float32 sum in global memory."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from ....core.constant import Constant
from ....core.words import add_floats
from ....pipeline.cursor import Cursor
from ...wgmma import ROWS
from ..config import PANEL_COLUMNS
from ..placement import WARPGROUP


class Share(Constant):
    """The operands of a warpgroup's columns of dQ, made once."""

    def __init__(self, context, team: int):
        cfg = context.cfg
        self.product, self.panels = cfg.dq(team), cfg.dq_panels(team)
        self.first = self.panels.start * PANEL_COLUMNS * ROWS  # of the block's sum
        if self.panels:
            keys = context.smem.pointer("K", cfg.dtype) + self.panels.start * (cfg.k_tile.panel_bytes // 2)
            self.ds = self.product.a_at(context.smem.pointer("dS", cfg.dtype))
            self.k = self.product.b_at(keys)

    def start(self, ds: Cursor) -> cute.Tensor:
        """Start dQ = dS K; returns its accumulator."""
        dq = self.product.accumulator()
        self.product.issue(dq, self.ds[None, None, None, ds.stage], self.k[None, None, None, 0], False)
        return dq

    def add(self, context, work, m_block: Int32, head: Int32, dq: cute.Tensor) -> None:
        """Add a finished product to the sum of a query block: four elements of a thread lie side by side."""
        block = context.args.dq_sum[None, work.row_block + m_block, head].iterator
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        place = block + (self.first + 4 * thread)
        for i in range(0, cute.size(dq), 4):
            add_floats(place + i * WARPGROUP, [dq[i + j] for j in range(4)])
