"""Queue of work tiles: which tile is next, and its rows, keys and key blocks.

The work loop is the same in every role:

    queue = Queue.first(context, "load")
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

from ...pipeline.cursor import Cursor, consume, produce
from ...runtime.counters import NUMBERS
from ..launch import ForwardContext
from .work import Work, work_tile

INDEX_BYTES = 4


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
    def first(context: ForwardContext, role: str = "", takes: bool = False) -> Queue | CountedQueue:
        """Return a role's position at the first tile. takes: the role takes tiles from the counter, if there is one."""
        return CountedQueue.first(context, role, takes) if context.cfg.has_counter else Queue(context, Int32(0))

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

    def end(self) -> None:
        """Called by the role that takes tiles, when there are no more."""

    def __extract_mlir_values__(self):
        return [self.lap.ir_value()]

    def __new_from_mlir_values__(self, values):
        return Queue(self.context, Int32(values[0]))


class CountedQueue:
    """Position of a role in the order of work tiles, if CTAs take tiles by a counter. The interface is that of `Queue`.

    A CTA that starts late, because another kernel held its multiprocessor, finds the tiles taken. `args.counter` counts
    the tiles that are taken, and in its last number the CTAs that have ended; both are 0 before a launch. The load role
    takes a tile when it has loaded the one before, and stores its index to shared memory for all roles. The last CTA to
    end sets both to 0 for the next launch.
    """

    def __init__(self, context: ForwardContext, index: Int32, read: Cursor, taken: Cursor | None):
        self.context, self.index, self.read, self.taken = context, index, read, taken

    @staticmethod
    def first(context: ForwardContext, role: str, takes: bool) -> CountedQueue:
        ends = context.ends(role)
        taken = produce(ends.load_all_index) if takes else None
        return CountedQueue(context, Int32(0), consume(ends.load_all_index), taken).next()

    def has_tile(self) -> Boolean:
        return self.index < self.context.args.tiles

    def tile(self) -> Work:
        return work_tile(self.context, self.index)

    def next(self) -> CountedQueue:
        place, taken = self.context.smem.pointer("index", Int32), self.taken
        if taken is not None:
            taken.wait()
            with cute.arch.elect_one():
                counter = self.context.args.counter.iterator
                index = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
                cute.arch.store(place, index)
            taken.arrive()
            taken = taken.next()
        self.read.wait()
        index = cute.arch.load(place, Int32)
        self.read.arrive()
        return CountedQueue(self.context, index, self.read.next(), taken)

    def end(self) -> None:
        count_end(self.context.args.counter)

    def __extract_mlir_values__(self):
        cursors = [self.read] if self.taken is None else [self.read, self.taken]
        return [self.index.ir_value(), *(x for cursor in cursors for x in cursor.__extract_mlir_values__())]

    def __new_from_mlir_values__(self, values):
        n = len(self.read.__extract_mlir_values__())
        read = self.read.__new_from_mlir_values__(values[1 : 1 + n])
        taken = None if self.taken is None else self.taken.__new_from_mlir_values__(values[1 + n :])
        return CountedQueue(self.context, Int32(values[0]), read, taken)


@cute.jit
def count_end(counter: cute.Tensor):
    """Whole warp: count the end of a CTA; the last one sets the counter to 0. Acquire and release order this after the
    last tile of every CTA."""
    with cute.arch.elect_one():
        taken, ended = counter.iterator, counter.iterator + (NUMBERS - 1)
        count = cute.arch.atomic_add(ended, Int32(1), sem="acq_rel", scope="gpu")
        if count == Int32(cute.arch.grid_dim()[0]) - 1:
            cute.arch.store(taken, Int32(0))
            cute.arch.store(ended, Int32(0))
