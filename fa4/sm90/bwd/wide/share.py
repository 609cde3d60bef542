"""A warpgroup's columns of dQ: from the products to the float32 sum in global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from ....core.constant import Constant
from ....core.vec_io import add_floats, bits, store_vec
from ....pipeline.cursor import Cursor, consume, produce
from ...wgmma import ROWS
from ..config import PANEL_COLUMNS
from ..placement import WARPGROUP
from .semaphores import order_index_at


class Share(Constant):
    """The operands of a warpgroup's columns of dQ, made once. Of a pair, each CTA has half of the columns."""

    def __init__(self, context, consumer: int, ends):
        cfg, place = context.cfg, context.smem.pointer
        self.cfg, self.ends = cfg, ends
        self.product, self.panels = cfg.dq(consumer), cfg.dq_panels(consumer)
        of_cta = context.args.order.rank * cfg.cta_panels
        self.first = (of_cta + self.panels.start) * (PANEL_COLUMNS * ROWS)  # of the block's sum
        if self.panels:
            panel = cfg.k_tile.panel_bytes // 2
            self.ds = self.product.a_at(place("dS", cfg.dtype))
            self.k = self.product.b_at(place("K", cfg.dtype) + (of_cta + self.panels.start) * panel)
            if cfg.ctas == 2:
                self.others_ds = self.product.a_at(place("dS", cfg.dtype) + cfg.ds_tile.panel_bytes // 2)
                self.others_k = self.product.b_at(place("Kother", cfg.dtype) + self.panels.start * panel)

    @property
    def products(self) -> int:
        """That `start` starts."""
        return self.cfg.ctas if self.panels else 0

    def wait_for_keys(self) -> None:
        """Until the other CTA's keys are there."""
        if self.cfg.ctas == 2:
            consume(self.ends.load_compute_Kother).wait()

    def start(self, ds: Cursor) -> cute.Tensor | None:
        """When dS of a step is there, start dQ = dS K; returns its accumulator."""
        dq = None
        if self.panels:
            ds.wait()
            dq = self.product.accumulator()
            self.product.issue(dq, self.ds[None, None, None, ds.stage], self.k[None, None, None, 0], False)
            if self.cfg.ctas == 2:
                ds.in_step(consume(self.ends.dK_compute_dSother)).wait()
                others = self.others_ds[None, None, None, ds.stage]
                self.product.issue(dq, others, self.others_k[None, None, None, 0], True)
        return dq

    def arrive(self, ds: Cursor) -> None:
        """The products have read dS."""
        if self.cfg.ctas == 2:
            ds.in_step(consume(self.ends.dK_compute_dSother)).arrive()
        else:
            ds.arrive()

    def add(self, context, work, at, dq: cute.Tensor | None) -> None:
        """Add a finished product, of the step before that of the cursors `at`, to the sum of its query block: four
        elements of a thread lie side by side."""
        elements = [] if dq is None else [dq[i] for i in range(cute.size(dq))]
        block = work.sums(context)[0][None, work.row_block + at.last_block, at.last_head].iterator
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        place = block + (self.first + 4 * thread)
        if context.cfg.deterministic:
            order_index = at.last_ds.in_step(consume(self.ends.acquire_compute_order))
            order_index.wait()
            add_or_store(place, elements, order_index_at(context, order_index.stage) != 0)
            at.last_ds.in_step(produce(self.ends.compute_release_dQ)).arrive()
        else:
            add(place, elements)


def add(place: cute.Pointer, elements: list[Float32]) -> None:
    """A thread's elements to those at a place."""
    for i in range(0, len(elements), 4):
        add_floats(place + i * WARPGROUP, elements[i : i + 4])


@cute.jit
def add_or_store(place: cute.Pointer, elements: cutlass.Constexpr[list], adds: Boolean):
    """The same if somebody has stored there; if not, this thread does."""
    if adds:
        add(place, elements)
    else:
        for i in cutlass.range_constexpr(0, len(elements), 4):
            store_vec(place + i * WARPGROUP, [bits(x) for x in elements[i : i + 4]])
