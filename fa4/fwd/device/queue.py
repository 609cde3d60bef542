"""Queue of work tiles: which tile is next, and its rows, keys and key blocks.

The work loop is the same in every role:

    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        ...
        queue = queue.next()
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..launch import ForwardContext
from .work import Work, work_tile


def row_tile(cfg: Any, work: Work, rank: Int32, consumer: Int32 | int) -> Int32:
    """Return the index of a consumer's 64 rows in the sequence. cfg: has `ctas` and `consumers`. rank: of the CTA
    within the pair of a work tile."""
    return (work.m_block * cfg.ctas + rank) * cfg.consumers + consumer


class Queue:
    """Position of a role in the order of work tiles. Immutable; `queue = queue.next()`.

    A persistent grid uses snake order: the CTA that gets the last tile of a lap gets the first tile of the next lap.
    When tiles get shorter along the order (causal), all CTAs get about the same amount of work.
    """

    def __init__(self, context: ForwardContext, lap: Int32):
        self.context, self.lap = context, lap

    @staticmethod
    def first(context: ForwardContext) -> Queue:
        return Queue(context, Int32(0))

    @property
    def index(self) -> Int32:
        order, cta = self.context.args.order, Int32(cute.arch.block_idx()[0]) // self.context.cfg.ctas
        if not self.context.cfg.persistent:
            return cta + self.lap * self.context.args.tiles
        pos = cutlass.select_(Boolean(self.lap % 2 == 1), order.stride - 1 - cta, cta)
        return self.lap * order.stride + Int32(pos)

    def has_tile(self) -> Boolean:
        return self.index < self.context.args.tiles

    def tile(self) -> Work:
        return work_tile(self.context, self.index)

    def next(self) -> Queue:
        return Queue(self.context, self.lap + 1)

    def __extract_mlir_values__(self):
        return [self.lap.ir_value()]

    def __new_from_mlir_values__(self, values):
        return Queue(self.context, Int32(values[0]))
