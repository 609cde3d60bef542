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
from cutlass import Boolean, Int32, const_expr

from ...core.order import Tile
from ...core.vec_io import load_vec, store_vec
from ...pipeline.cursor import Cursor, consume, produce
from ...pipeline.ends import LEADER
from ...runtime.counters import NUMBERS
from ..launch import ForwardContext
from .work import Place, Work, place_of, work_at, work_tile

NUMBERS_OF_PLACE = 4
PLACE_BYTES = 4 * NUMBERS_OF_PLACE


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
    def first(context: ForwardContext, role: str = "") -> Queue | CountedQueue:
        """Return a role's position at the first tile."""
        return CountedQueue.first(context, role) if context.cfg.has_counter else Queue(context, Int32(0))

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


class CountedQueue:
    """Position of a role in the order of work tiles, if CTAs take tiles by a counter. The interface is that of `Queue`.

    A CTA that starts late, because another kernel held its multiprocessor, finds the tiles taken. `args.counter` counts
    the tiles that are taken, and in its last number the CTAs that have ended; both are 0 before a launch. The schedule
    role takes a tile when all roles have begun the one before, and stores its place in the order to shared memory for
    them. So the place is there before a role asks for it, and one warp does the divisions for all. In a pair, the
    leader takes tiles and counts for both CTAs. The last CTA to end sets both numbers to 0 for the next launch.
    """

    def __init__(self, context: ForwardContext, place: Place, read: Cursor, taken: Cursor | None):
        self.context, self.place, self.read, self.taken = context, place, read, taken

    @staticmethod
    def first(context: ForwardContext, role: str, takes: bool = False) -> CountedQueue:
        """Return a role's position at the first tile. takes: the role takes tiles for all."""
        ends, nowhere = context.ends(role), Int32(0)
        taken = produce(ends.schedule_all_place) if takes else None
        place = Place(Tile(nowhere, nowhere, nowhere), nowhere)
        return CountedQueue(context, place, consume(ends.schedule_all_place), taken).next()

    def has_tile(self) -> Boolean:
        return self.place.part >= 0

    def tile(self) -> Work:
        return work_at(self.context, self.place)

    def next(self) -> CountedQueue:
        stored, taken = self.context.smem.pointer("place", Int32), self.taken
        if taken is not None:
            take(self.context, stored, taken)
            taken = taken.next()
        self.read.wait()
        *tile, part = load_vec(stored, NUMBERS_OF_PLACE)
        self.read.arrive()
        return CountedQueue(self.context, Place(Tile(*tile), part), self.read.next(), taken)

    def __extract_mlir_values__(self):
        cursors = [self.read] if self.taken is None else [self.read, self.taken]
        numbers = [number.ir_value() for number in (*self.place.tile, self.place.part)]
        return [*numbers, *(x for cursor in cursors for x in cursor.__extract_mlir_values__())]

    def __new_from_mlir_values__(self, values):
        *tile, part = map(Int32, values[:NUMBERS_OF_PLACE])
        values, n = values[NUMBERS_OF_PLACE:], len(self.read.__extract_mlir_values__())
        read = self.read.__new_from_mlir_values__(values[:n])
        taken = None if self.taken is None else self.taken.__new_from_mlir_values__(values[n:])
        return CountedQueue(self.context, Place(Tile(*tile), part), read, taken)


@cute.jit
def take(context: Any, stored: cute.Pointer, taken: Cursor):
    """Whole warp: take a tile, and fill a stage with its place. In a pair only the leader does, for both CTAs."""
    if context.args.order.rank == LEADER:
        taken.wait()
        with cute.arch.elect_one():
            index = cute.arch.atomic_add(context.args.counter.iterator, Int32(1), sem="relaxed", scope="gpu")
            place = place_of(context, index)
            part = cutlass.select_(index < context.args.tiles, place.part, Int32(-1))
            numbers = [*place.tile, Int32(part)]
            if const_expr(context.cfg.ctas > 1):
                taken.store(stored, numbers)
            else:
                store_vec(stored, numbers)
        if const_expr(context.cfg.ctas == 1):
            taken.arrive()


@cute.jit
def count_end(context: Any):
    """Whole warp: count the end of a CTA or pair; the last one sets the counter to 0. Acquire and release order this
    after the last tile of every CTA."""
    if context.args.order.rank == LEADER:
        with cute.arch.elect_one():
            taken = context.args.counter.iterator
            ended = taken + (NUMBERS - 1)
            count = cute.arch.atomic_add(ended, Int32(1), sem="acq_rel", scope="gpu")
            if count == context.args.order.stride - 1:
                cute.arch.store(taken, Int32(0))
                cute.arch.store(ended, Int32(0))
