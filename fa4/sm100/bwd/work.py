"""Work of one CTA: a key block of one kv head, and the query blocks that see it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...bwd.device.work import cta_keys, first_member, order_index, sparse_blocks_of
from ...core.mask import Band, SparseBlocks
from ...core.rows import Rows
from .config import Sm100BackwardSteps
from .context import Sm100StepsContext


class Sm100BackwardWork(NamedTuple):
    """A key block of a CTA or of a pair, and its steps: the query blocks first <= m < stop of each query head of the
    group."""

    n_block: Int32  # for the fields up to `steps` see `KeyBlock`
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
    own_block: Int32  # this CTA's block of `cta_tile_n` keys

    @property
    def own_head(self) -> Int32:
        """Head of the keys that the CTA owns."""
        return self.head_kv

    def of_head(self, context: Sm100StepsContext, member: Int32) -> Sm100BackwardWork:
        """The work of one query head of the group, which may have its own block lists."""
        if not context.cfg.lists_by_head:
            return self
        block_iter = sparse_blocks_of(context, self, self.head_kv * context.cfg.group + member)
        return self._replace(block_iter=block_iter, stop=block_iter.count)

    def step(self, index: Int32, group: int) -> tuple[Int32, Int32]:
        """(query head, query block) of a step, if all heads of the group have the same query blocks."""
        blocks = self.stop - self.first
        return self.head_kv * group + index // blocks, self.block(self.first + index % blocks)

    def block(self, i: Int32) -> Int32:
        """Query block of step i of a head: i, or the i-th listed block of a block mask."""
        return i if self.block_iter is None else self.block_iter.block(i)

    def needs_mask(self, m_block: Int32, cfg: Sm100BackwardSteps) -> Boolean:
        """True if the band masks some pair of a query block and this CTA's keys."""
        return replace(self.mask, tile_n=cfg.cta_tile_n).needs_mask(m_block, self.own_block)

    def order_index(self, m_block: Int32, head: Int32, context: Sm100StepsContext) -> Int32:
        """See `bwd.device.work.order_index`."""
        return order_index(context, self, m_block, head, self.n_block, self.mask)


def work_tile(context: Sm100StepsContext) -> Sm100BackwardWork:
    """Return this CTA's work; `steps` is 0 if no query sees a key of the block."""
    cfg, keys, rank = context.cfg, cta_keys(context), context.args.order.rank
    return Sm100BackwardWork(*keys, rank, keys.n_block * cfg.ctas + rank)


class ListPosition(NamedTuple):
    """Step position if query heads have their own block lists: the `pos`-th listed block of a head of the group."""

    member: Int32
    pos: Int32

    @staticmethod
    def first(context: Sm100StepsContext, work: Sm100BackwardWork) -> ListPosition:
        return ListPosition(first_member(context, work), Int32(0))

    def coord(self, context: Sm100StepsContext, work: Sm100BackwardWork) -> tuple[Int32, Int32]:
        """(query head, query block) of the step."""
        return work.head_kv * context.cfg.group + self.member, work.of_head(context, self.member).block(self.pos)


@cute.jit
def next_position(context: Sm100StepsContext, work: Sm100BackwardWork, position: ListPosition) -> ListPosition:
    """Return the position of the next step; past the last step it is not valid."""
    member, i, last = position.member, position.pos + 1, context.cfg.group - 1
    count = work.of_head(context, member).stop
    while (i >= count) & (member < last):
        member, i = member + 1, Int32(0)
        count = work.of_head(context, member).stop
    return ListPosition(member, i)
