"""What one CTA works on: a block of keys of one key/value head, and the query blocks that see it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...bwd.work import keys_here, lists_of, order_index, order_index_by_lists
from ...core.mask import Band, SparseBlocks
from ...core.order import Tile
from ...core.sequence import Rows
from ..wgmma import ROWS
from .config import CONSUMERS


class Neighbours(NamedTuple):
    """Key blocks of a sequence whose CTAs run at the same time: `count` of them, this one being number `place`."""

    place: Int32
    count: Int32


class Work(NamedTuple):
    """A block of keys and its steps: for each query head of the group, the query blocks first <= m < stop.

    The mask hides nothing in those full_first <= m < full_stop.
    """

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
    full_first: Int32
    full_stop: Int32
    neighbours: Neighbours | None  # if CTAs are `staggered`
    ascends: Int32 | None  # 1 in a section whose key blocks ascend, 0 if not; None where there are no such
    back: Int32 | None  # 1 if a query head's steps go from its last query block to the first, 0 if not; None as above

    @property
    def blocks(self) -> Int32:
        """Query blocks of one head; 0 if no query sees a key."""
        return self.stop - self.first

    def of_head(self, context, member: Int32) -> Work:
        """The same for a query head of the group, whose lists, or whose way through the query blocks, may be others."""
        if not context.cfg.differs_by_head:
            return self
        if not context.cfg.lists_by_head:
            return self._replace(back=back(self.ascends, member, context.cfg.group))
        block_iter = lists_of(context, self, self.head_kv * context.cfg.group + member)
        return self._replace(
            block_iter=block_iter, stop=block_iter.count, full_first=block_iter.masked, full_stop=block_iter.count
        )

    def block(self, i: Int32) -> Int32:
        """The query block of step first <= i < stop: i itself, or counted back from the last, or that at a place of the
        lists; or, with neighbours, so that these begin evenly apart and go round."""
        if self.block_iter is not None:
            return self.block_iter.block(i)
        if self.back is not None:
            return i + self.back * (self.first + self.stop - 1 - 2 * i)
        if self.neighbours is None:
            return i
        m_block = i + self.neighbours.place * self.blocks // self.neighbours.count
        return Int32(cutlass.select_(m_block < self.stop, m_block, m_block - self.blocks))

    def order_index(self, m_block: Int32, head: Int32, context) -> Int32:
        """How many key blocks add to dQ of a query block before this one; all that the query block meets do. The CTAs
        of these have lower launch indices."""
        cfg = context.cfg
        if cfg.has_blocks:
            return order_index_by_lists(context.args, cfg, self.row_block + m_block, head, self.n_block)
        block, mask = of_pair(self.n_block, self.mask, cfg)
        before = order_index(context.args.order, mask, m_block, Tile(block, self.head_kv, self.batch))
        return before // cfg.chains_of(context.args) if cfg.chained else before

    def sums(self, context) -> tuple[cute.Tensor, cute.Tensor | None]:
        """dQ's sums and counters of all blocks and heads, those of this key block's chain."""
        args, cfg = context.args, context.cfg
        if not cfg.chained:
            return args.dq_sum, args.semaphores
        chain = of_pair(self.n_block, self.mask, cfg)[0] % cfg.chains_of(args)
        return args.dq_sum[None, None, None, chain], args.semaphores[None, None, chain]


def work_tile(context) -> Work:
    """This CTA's work."""
    cfg, keys = context.cfg, keys_here(context)
    neighbours = None
    if cfg.staggered:
        place = keys.n_block % cfg.most_blocks
        together = (keys.k.count + cfg.cluster_tile_n - 1) // cfg.cluster_tile_n - (keys.n_block - place)
        neighbours = Neighbours(place, cutlass.min(together, cfg.most_blocks))
    tile = Tile(keys.n_block, keys.head_kv, keys.batch)
    if cfg.ctas == 2:
        # The pair walks together; each CTA's own keys are a block of half as many.
        mask = replace(keys.mask, tile_n=cfg.cluster_tile_n // 2)
        keys = keys._replace(n_block=keys.n_block * 2 + context.args.order.rank, mask=mask)
    full = whole_blocks(keys.mask, keys.n_block, keys.first, keys.stop)
    if keys.block_iter is not None:
        full = keys.block_iter.masked, keys.stop
    ascends = context.args.order.goes_back(tile) if cfg.folds else None
    of_first = None if ascends is None else back(ascends, Int32(0), cfg.group)
    return Work(*keys, *full, neighbours, ascends, of_first)


def of_pair(n_block: Int32, mask: Band, cfg) -> tuple[Int32, Band]:
    """The block of keys whose dQ is added at once, and the mask of such blocks: a pair's, or a CTA's own."""
    return (n_block // 2, replace(mask, tile_n=cfg.cluster_tile_n)) if cfg.ctas == 2 else (n_block, mask)


def back(ascends: Int32, member: Int32, group: int) -> Int32:
    """1 if a query head's steps go from its last query block to the first, 0 if not.

    For each head that is done a key block gains two steps on the one before it, which has two more. Where blocks begin
    at once, the one behind is then 2, 4, 6, ... steps behind on the way there and two fewer on the way back; where
    they end at once, it is so many before the end. The fewer, the less goes through the L2 cache meanwhile, but two
    there must be, to take turns.
    """
    if group == 1:
        return ascends
    there = cutlass.select_(ascends == 1, member != group - 1, member == 0)
    return Int32(cutlass.select_(there, Int32(0), Int32(1)))


class OwnSteps(NamedTuple):
    """Of a CTA's steps, those first <= i < stop of one warpgroup, whose keys are seen by none at the others. The mask
    hides nothing in those full_first <= i < full_stop."""

    first: Int32
    full_first: Int32
    full_stop: Int32
    stop: Int32

    def cut(self, half: Int32, first: Int32) -> tuple[Int32, Int32]:
        """From step `first` on, those that the mask cuts: in half 0 before those it does not, in half 1 after them."""
        begin = cutlass.select_(half == 0, first, cutlass.max(first, self.full_stop))
        return Int32(begin), Int32(cutlass.select_(half == 0, self.full_first, self.stop))

    def full(self, half: Int32, first: Int32, none: Int32) -> tuple[Int32, Int32]:
        """And those that it does not, all of which are half 0's; none: no step is before it."""
        end = cutlass.select_(half == 0, self.full_stop, none)
        return cutlass.max(first, self.full_first), Int32(end)


def own_steps(work: Work, consumer: Int32, cfg) -> OwnSteps:
    """A warpgroup's."""
    own = OwnSteps(work.first, work.full_first, work.full_stop, work.stop)
    if cfg.trims:
        mask, block = replace(work.mask, tile_n=ROWS), work.n_block * CONSUMERS + consumer
        first, _ = mask.query_blocks(block)
        first = cutlass.min(cutlass.max(first, work.first), work.stop)
        own = OwnSteps(first, *whole_blocks(mask, block, first, work.stop), work.stop)
    if work.back is None:
        return own
    last = work.first + work.stop
    turned = OwnSteps(*(at + work.back * (last - at - other) for at, other in zip(own, reversed(own))))
    return turned if cfg.trims else turned._replace(first=work.first, stop=work.stop)


def whole_blocks(mask: Band, n_block: Int32, first: Int32, stop: Int32) -> tuple[Int32, Int32]:
    """Of the query blocks first <= m < stop, those all of whose queries see all keys of a block."""
    sees_last, _ = mask.queries((n_block + 1) * mask.tile_n - 1)
    _, misses_first = mask.queries(n_block * mask.tile_n)
    full_first = (cutlass.max(sees_last, 0) + mask.tile_m - 1) // mask.tile_m
    # A block of keys that ends beyond the last key is seen whole by nobody.
    full_first = cutlass.select_((n_block + 1) * mask.tile_n <= mask.seqlen_k, full_first, stop)
    full_first = cutlass.max(cutlass.min(Int32(full_first), stop), first)
    full_stop = stop
    if mask.left is not None:
        full_stop = cutlass.max(misses_first, 0) // mask.tile_m
        full_stop = cutlass.max(cutlass.min(full_stop, stop), full_first)
    return full_first, full_stop
