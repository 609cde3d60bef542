"""Which work tile next, and what it consists of: rows, keys, key blocks.

The loop over work is the same in every role:

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        ...
        queue = queue.next()
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...core.mask import Band, Blocks, Mask
from ...core.sequence import Rows
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
        return self.index < self.context.args.order.tiles

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
        index = Int32(cutlass.select_(is_taken != 0, index, order.tiles))
        return Queue(self.context, index, self.answers.next())

    def __get_mlir_types__(self):
        return [self.index.type, *([] if self.answers is None else self.answers.__get_mlir_types__())]

    def __extract_mlir_values__(self):
        return [self.index.ir_value(), *([] if self.answers is None else self.answers.__extract_mlir_values__())]

    def __new_from_mlir_values__(self, values):
        answers = None if self.answers is None else self.answers.__new_from_mlir_values__(values[1:])
        return Queue(self.context, Int32(values[0]), answers)


class Work(NamedTuple):
    """One work tile: both Q tiles of a row block, for one (packed) head of one sequence."""

    m_block: Int32
    head: Int32
    head_kv: Int32
    batch: Int32
    place: Rows  # all query rows of the sequence
    q: Rows  # those of them that hold data
    k: Rows
    mask: Mask
    blocks: Blocks  # key blocks, taken from stop - 1 down to first
    ascends: Boolean  # except that the unmasked ones may be taken the other way round

    @property
    def count(self) -> Int32:
        return self.blocks.stop - self.blocks.first

    def block(self, i: Int32) -> Int32:
        """The i-th key block to take."""
        b, descending = self.blocks, self.blocks.stop - 1 - i
        is_full = (descending >= b.full_first) & (descending < b.full_stop)
        ascending = b.full_first + (b.full_stop - 1 - descending)
        return Int32(cutlass.select_(self.ascends & is_full, ascending, descending))


def work_tile(context, index: Int32) -> Work:
    """What a work tile consists of; empty (`count` 0) if no row of it sees a key."""
    args, cfg = context.args, context.cfg
    m_block, head, batch = args.order.at(index)
    place = args.lengths.query_place(batch, args.seqlen_q)
    q = args.lengths.queries(batch, args.seqlen_q)
    k = args.lengths.keys(batch, args.seqlen_k)
    left = args.left if cfg.has_left else None
    right = args.right if cfg.has_right else None
    mask = Band(cfg.rows, cfg.tile_n, q.count, k.count, left, right, cfg.packed)
    blocks = mask.key_blocks(m_block)
    is_empty = Boolean(m_block * cfg.rows >= q.count * cfg.packed)
    stop = cutlass.select_(is_empty, blocks.first, blocks.stop)
    blocks = Blocks(*(cutlass.min(Int32(bound), Int32(stop)) for bound in blocks))
    head_kv = head if cfg.packed == cfg.group else head * cfg.packed // cfg.group
    ascends = Boolean(index // args.order.stride % 2 == 1) if cfg.sawtooth else Boolean(False)
    return Work(m_block, head, head_kv, batch, place, q, k, mask, blocks, ascends)


def row_tile(context, work: Work, tile) -> Int32:
    """Which block of `tile_m` rows of the sequence this CTA has in its Q tile `tile`."""
    cfg = context.cfg
    return (work.m_block * cfg.q_tiles + tile) * cfg.ctas + context.args.order.rank
