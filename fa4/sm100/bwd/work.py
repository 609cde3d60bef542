"""What one CTA works on: a block of keys of one key/value head, and the query blocks that see it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...bwd.work import first_member, keys_here, lists_of, order_index, order_index_by_lists
from ...core.mask import Band, SparseBlocks
from ...core.order import Tile
from ...core.sequence import Rows
from .config import TILE_N


class Work(NamedTuple):
    """A block of keys, of a CTA or of a pair, and its steps: for each query head of the group, the query blocks
    first <= m < stop."""

    n_block: Int32  # down to `steps`: see `Keys`
    head_kv: Int32
    batch: Int32
    q: Rows
    k: Rows
    mask: Band
    first: Int32
    stop: Int32
    row_block: Int32
    block_iter: SparseBlocks | None
    steps: Int32
    rank: Int32  # of this CTA in its pair
    own_block: Int32  # this CTA's block of TILE_N keys

    def of_head(self, context, member: Int32) -> Work:
        """The same for a query head of the group, whose lists may be others."""
        if not context.cfg.lists_by_head:
            return self
        block_iter = lists_of(context, self, self.head_kv * context.cfg.group + member)
        return self._replace(block_iter=block_iter, stop=block_iter.count)

    def step(self, index: Int32, group: int) -> tuple[Int32, Int32]:
        """(query head, query block) of a step, where all heads of the group have the same."""
        blocks = self.stop - self.first
        return self.head_kv * group + index // blocks, self.block(self.first + index % blocks)

    def block(self, i: Int32) -> Int32:
        """The query block of a step of a head: i itself, or that at a place of the lists."""
        return i if self.block_iter is None else self.block_iter.block(i)

    def cuts(self, m_block: Int32) -> Boolean:
        """Whether some query of a block misses some of this CTA's keys."""
        return replace(self.mask, tile_n=TILE_N).cuts(m_block, self.own_block)

    def order_index(self, m_block: Int32, head: Int32, context) -> Int32:
        """How many key blocks add to dQ of a query block before this one."""
        cfg = context.cfg
        if cfg.has_blocks:
            return order_index_by_lists(context.args, cfg, self.row_block + m_block, head, self.n_block)
        return order_index(context.args.order, self.mask, m_block, Tile(self.n_block, self.head_kv, self.batch))


def work_tile(context) -> Work:
    """This CTA's work; `steps` is 0 if no query sees a key of the block."""
    cfg, keys, rank = context.cfg, keys_here(context), context.args.order.rank
    return Work(*keys, rank, keys.n_block * cfg.ctas + rank)


class Place(NamedTuple):
    """A step where query heads have lists of their own: a place in those of a head of the group."""

    member: Int32
    place: Int32

    @staticmethod
    def first(context, work: Work) -> Place:
        return Place(first_member(context, work), Int32(0))

    def at(self, context, work: Work) -> tuple[Int32, Int32]:
        """(query head, query block)."""
        return work.head_kv * context.cfg.group + self.member, work.of_head(context, self.member).block(self.place)


@cute.jit
def following(context, work: Work, place: Place) -> Place:
    """The next step; there may be none."""
    member, i, last = place.member, place.place + 1, context.cfg.group - 1
    count = work.of_head(context, member).stop
    while (i >= count) & (member < last):
        member, i = member + 1, Int32(0)
        count = work.of_head(context, member).stop
    return Place(member, i)
