"""A consumer's columns of dQ: products, and additions to the float32 sum in global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from ....core.constant import Constant
from ....core.vec_io import add_floats, bits, store_vec
from ....pipeline.cursor import Cursor, consume, produce
from ...wgmma import ROWS
from ..common.config import PANEL_COLUMNS, WARPGROUP
from ..common.work import Sm90BackwardWork
from .context import Sm90WideContext
from .semaphores import order_index_at


class DqShare(Constant):
    """Operands of a consumer's columns of dQ, created once. In a pair, each CTA has half of the columns."""

    def __init__(self, context: Sm90WideContext, consumer: int, ends):
        cfg, ptr = context.cfg, context.smem.pointer
        self.cfg, self.ends = cfg, ends
        self.product, self.panels = cfg.dq(consumer), cfg.dq_panels(consumer)
        cta_panel = context.args.order.rank * cfg.cta_panels
        self.first = (cta_panel + self.panels.start) * (PANEL_COLUMNS * ROWS)  # of the block's sum
        if self.panels:
            panel = cfg.k_tile.panel_bytes // 2
            self.ds = self.product.a_at(ptr("dS", cfg.dtype))
            self.k = self.product.b_at(ptr("K", cfg.dtype) + cfg.panel(cta_panel + self.panels.start) * panel)
            if cfg.ctas == 2:
                self.peer_ds = self.product.a_at(ptr("dS", cfg.dtype) + cfg.ds_tile.panel_bytes // 2)
                self.peer_k = self.product.b_at(ptr("Kother", cfg.dtype) + self.panels.start * panel)

    @property
    def products(self) -> int:
        """Products that `start` issues."""
        return self.cfg.ctas if self.panels else 0

    def wait_peer_keys(self) -> None:
        """Wait for the peer CTA's keys."""
        if self.cfg.ctas == 2:
            consume(self.ends.load_compute_Kother).wait()

    def start(self, ds: Cursor) -> cute.Tensor | None:
        """Wait for dS of a step and start dQ = dS K. Returns the accumulator, or None without columns."""
        dq = None
        if self.panels:
            ds.wait()
            dq = self.product.accumulator()
            self.product.issue(dq, self.ds[None, None, None, ds.stage], self.k[None, None, None, 0], False)
            if self.cfg.ctas == 2:
                ds.at_iteration_of(consume(self.ends.dK_compute_dSother)).wait()
                ds_of_peer = self.peer_ds[None, None, None, ds.stage]
                self.product.issue(dq, ds_of_peer, self.peer_k[None, None, None, 0], True)
        return dq

    def arrive(self, ds: Cursor) -> None:
        """Release dS after the products have read it."""
        if self.cfg.ctas == 2:
            ds.at_iteration_of(consume(self.ends.dK_compute_dSother)).arrive()
        else:
            ds.arrive()

    def add(self, context: Sm90WideContext, work: Sm90BackwardWork, cursors, dq: cute.Tensor | None) -> None:
        """Add a finished product, of the step before that of `cursors`, to the sum of its query block. Four elements of
        a thread are contiguous."""
        values = [] if dq is None else [dq[i] for i in range(cute.size(dq))]
        block = work.sums(context)[0][None, work.row_block + cursors.last_block, cursors.last_head].iterator
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        ptr = block + (self.first + 4 * thread)
        if context.cfg.deterministic:
            order_cursor = cursors.last_ds.at_iteration_of(consume(self.ends.acquire_compute_order))
            order_cursor.wait()
            add_or_store(ptr, values, order_index_at(context, order_cursor.stage) != 0)
            cursors.last_ds.at_iteration_of(produce(self.ends.compute_release_dQ)).arrive()
        else:
            add(ptr, values)


def add(ptr: cute.Pointer, values: list[Float32]) -> None:
    """Add a thread's elements to those at `ptr`."""
    for i in range(0, len(values), 4):
        add_floats(ptr + i * WARPGROUP, values[i : i + 4])


@cute.jit
def add_or_store(ptr: cute.Pointer, values: cutlass.Constexpr[list], adds: Boolean):
    """Add a thread's elements if the sum is initialised, else store them."""
    if adds:
        add(ptr, values)
    else:
        for i in cutlass.range_constexpr(0, len(values), 4):
            store_vec(ptr + i * WARPGROUP, [bits(x) for x in values[i : i + 4]])
