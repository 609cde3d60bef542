"""Which work tile next, and what it consists of: rows, keys, key blocks.

The loop over work is the same in every role:

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        ...
        queue = queue.next()
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...fwd.work import Work, work_tile
from ...pipeline.cursor import Cursor, consume
from .config import Schedule


class Queue:
    """Where a role stands in the order of work tiles. Immutable; `queue = queue.next()`."""

    def __init__(self, context, index: Int32, answers: Cursor | None):
        self.context, self.index, self.answers = context, index, answers

    @staticmethod
    def first(context, ends) -> Queue:
        """`ends`: the role's channels."""
        is_dynamic = context.cfg.schedule is Schedule.DYNAMIC
        answers = consume(ends.schedule_all_index) if is_dynamic else None
        return Queue(context, Int32(cute.arch.block_idx()[0]) // context.cfg.ctas, answers)

    def has_tile(self) -> Boolean:
        return self.index < self.context.args.tiles

    def tile(self) -> Work:
        return work_tile(self.context, self.index)

    def next(self) -> Queue:
        order = self.context.args.order
        if self.answers is None:
            return Queue(self.context, self.index + order.stride, None)
        # The hardware answers with the CTA whose place is taken, if one was left that had not started.
        self.answers.wait()
        index, _, _, is_taken = cute.arch.clc_response(self.context.smem.pointer("index", Int32))
        self.answers.arrive()
        index = Int32(cutlass.select_(is_taken != 0, index, self.context.args.tiles))
        return Queue(self.context, index, self.answers.next())

    def __get_mlir_types__(self):
        return [self.index.type, *([] if self.answers is None else self.answers.__get_mlir_types__())]

    def __extract_mlir_values__(self):
        return [self.index.ir_value(), *([] if self.answers is None else self.answers.__extract_mlir_values__())]

    def __new_from_mlir_values__(self, values):
        answers = None if self.answers is None else self.answers.__new_from_mlir_values__(values[1:])
        return Queue(self.context, Int32(values[0]), answers)


def key_block(context, work: Work, i: Int32) -> Int32:
    """The i-th key block to take: as a block mask lists them, or from last to first, but in every other work tile of a
    `sawtooth` the unmasked ones the other way round."""
    if context.cfg.has_blocks:
        return work.block_iter.block(i)
    b, descending = work.blocks, work.blocks.stop - 1 - i
    if not context.cfg.sawtooth:
        return Int32(descending)
    ascends = Boolean(work.index // context.args.order.stride % 2 == 1)
    is_full = (descending >= b.full_first) & (descending < b.full_stop)
    ascending = b.full_first + (b.full_stop - 1 - descending)
    return Int32(cutlass.select_(ascends & is_full, ascending, descending))


def row_tile(context, work: Work, tile) -> Int32:
    """Which block of `tile_m` rows of the sequence this CTA has in its Q tile `tile`."""
    cfg = context.cfg
    return (work.m_block * cfg.q_tiles + tile) * cfg.ctas + context.args.order.rank
