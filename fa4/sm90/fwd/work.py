"""Which work tile next, and what it consists of: rows, keys, key blocks.

The loop over work is the same in every role:

    queue = Queue.first(context)
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
from ...core.sequence import Rows, extent
from .config import Schedule


class Queue:
    """Where a role stands in the order of work tiles. Immutable; `queue = queue.next()`.

    A persistent grid goes to and fro: who is last to get one of a lap's tiles is first to get one of the next. Where
    tiles grow shorter along the order (causal), every CTA then gets about the same amount of work.
    """

    def __init__(self, context, lap: Int32):
        self.context, self.lap = context, lap

    @staticmethod
    def first(context) -> Queue:
        return Queue(context, Int32(0))

    @property
    def index(self) -> Int32:
        order, own = self.context.args.order, Int32(cute.arch.block_idx()[0])
        if self.context.cfg.schedule is Schedule.SINGLE:
            return own + self.lap * order.tiles
        place = cutlass.select_(Boolean(self.lap % 2 == 1), order.stride - 1 - own, own)
        return self.lap * order.stride + Int32(place)

    def has_tile(self) -> Boolean:
        return self.index < self.context.args.order.tiles

    def tile(self) -> Work:
        return work_tile(self.context, self.index)

    def next(self) -> Queue:
        return Queue(self.context, self.lap + 1)

    def __get_mlir_types__(self):
        return [self.lap.type]

    def __extract_mlir_values__(self):
        return [self.lap.ir_value()]

    def __new_from_mlir_values__(self, values):
        return Queue(self.context, Int32(values[0]))


class Work(NamedTuple):
    """One work tile: a row block of one (packed) head of one sequence."""

    m_block: Int32
    head: Int32
    head_kv: Int32
    batch: Int32
    q: Rows  # the sequence's query rows that hold data
    place: Rows  # its query rows that have a place in out
    k: Rows
    mask: Mask
    blocks: Blocks  # key blocks, taken from stop - 1 down to first

    @property
    def count(self) -> Int32:
        return self.blocks.stop - self.blocks.first


def work_tile(context, index: Int32) -> Work:
    """What a work tile consists of; empty (`count` 0) if no row of it sees a key."""
    args, cfg = context.args, context.cfg
    m_block, head, batch = args.order.at(index)
    place = args.lengths.query_place(batch, extent(args.out))
    q = args.lengths.queries(batch, extent(args.out))
    k = args.lengths.keys(batch, args.seqlen_k)
    left = args.left if cfg.has_left else None
    right = args.right if cfg.has_right else None
    mask = Band(cfg.rows, cfg.tile_n, q.count, k.count, left, right, cfg.packed)
    blocks = mask.key_blocks(m_block)
    is_empty = Boolean(m_block * cfg.rows >= q.count * cfg.packed)
    stop = cutlass.select_(is_empty, blocks.first, blocks.stop)
    blocks = Blocks(*(cutlass.min(Int32(bound), Int32(stop)) for bound in blocks))
    head_kv = head if cfg.packed == cfg.group else head * cfg.packed // cfg.group
    return Work(m_block, head, head_kv, batch, q, place, k, mask, blocks)
