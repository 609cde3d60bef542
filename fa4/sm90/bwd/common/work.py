"""Work of one CTA: a block of keys of one key/value head, and the query blocks that see it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ....bwd.device.work import KeyBlock, cta_keys, order_index, sparse_blocks_of
from ....core.mask import Band, SparseBlocks
from ....core.order import Order, Tile
from ....core.rows import Rows
from .context import Sm90StepsContext

StepCoord = tuple[Int32, Int32]  # of a query head, and of a query block among its steps
NO_BLOCK = 1 << 30  # beyond all blocks


class Neighbours(NamedTuple):
    """Key blocks of a sequence whose CTAs run at the same time: `count` blocks; this one has index `rank`. most_apart:
    see `LaunchOrder.most_apart`."""

    rank: Int32
    count: Int32
    most_apart: Int32

    def steps_behind(self, blocks: Int32) -> Int32:
        """Return how many of `blocks` steps this key block starts behind the first of the neighbours: evenly spaced,
        but at most `most_apart` steps behind the one before it."""
        return cutlass.min(self.rank * blocks // self.count, self.rank * self.most_apart)


class FinishedBlocks(NamedTuple):
    """Query blocks to which a key block adds last, in descending order: those from `first` on, which see no earlier key
    block. Those from `shared` on have a sum of later key blocks."""

    first: Int32
    shared: Int32

    @staticmethod
    def of(mask: Band, n_block: Int32) -> FinishedBlocks:
        _, stop = mask.queries(n_block * mask.tile_n - 1)  # of the last key of the block before
        first = (cutlass.max(stop, 0) + mask.tile_m - 1) // mask.tile_m
        first = cutlass.select_(n_block == 0, Int32(0), first)
        later, _ = mask.queries((n_block + 1) * mask.tile_n)  # of the first key of the block behind
        later = cutlass.max(later, 0) // mask.tile_m
        shared = cutlass.select_((n_block + 1) * mask.tile_n < mask.seqlen_k, cutlass.max(first, later), NO_BLOCK)
        # Computed once: uniform values are not computed again in every step.
        return FinishedBlocks(*(cute.arch.make_warp_uniform(Int32(x)) for x in (first, shared)))


class Sm90BackwardWork(NamedTuple):
    """Block of the keys of a CTA and its steps: for each query head of the group, the query blocks first <= m < stop.
    Blocks full_first <= m < full_stop are unmasked."""

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
    full_first: Int32
    full_stop: Int32
    neighbours: Neighbours | None  # if CTAs are `staggered`
    ascends: Int32 | None  # 1 in an L2 group with ascending key blocks, else 0; None without such groups
    order_head: Int32  # in the launch order, which counts parts of a head as heads
    reverse: Int32 | None  # 1 if a query head's steps go from its last query block to the first, else 0; None as above
    finished: FinishedBlocks | None  # if `last_finishes`

    @property
    def blocks(self) -> Int32:
        """Query blocks of one head; 0 if no query sees a key."""
        return self.stop - self.first

    def of_head(self, context: Sm90StepsContext, member: Int32) -> Sm90BackwardWork:
        """Return the work of a query head of the group, which may have its own block lists or its own direction."""
        if not context.cfg.differs_by_head:
            return self
        if not context.cfg.lists_by_head:
            return self._replace(reverse=reverse_flag(self.ascends, member, context.cfg.group))
        block_iter = sparse_blocks_of(context, self, self.head_kv * context.cfg.group + member)
        masked, stop = block_iter.masked, block_iter.count
        return self._replace(block_iter=block_iter, stop=stop, full_first=masked, full_stop=stop)

    def block(self, i: Int32) -> Int32:
        """Return the query block of step first <= i < stop: i itself; i counted back from the last block; entry i of
        the lists; or, with neighbours, i rotated so that the neighbours start spaced and wrap around."""
        if self.block_iter is not None:
            return self.block_iter.block(i)
        if self.reverse is not None:
            return i + self.reverse * (self.first + self.stop - 1 - 2 * i)
        if self.neighbours is None:
            return i
        m_block = i + self.neighbours.steps_behind(self.blocks)
        return Int32(cutlass.select_(m_block < self.stop, m_block, m_block - self.blocks))

    def order_index(self, m_block: Int32, head: Int32, context: Sm90StepsContext) -> Int32:
        """`bwd.device.work.order_index`; with chains, among the key blocks that add to the same sum."""
        block, mask = dq_block(self.n_block, self.mask, context.cfg)
        before = order_index(context, self._replace(head_kv=self.order_head), m_block, head, block, mask)
        return before // context.cfg.chains_of(context.args) if context.cfg.chained else before

    def sums(self, context: Sm90StepsContext) -> tuple[cute.Tensor, cute.Tensor | None]:
        """Return (dQ sums, semaphores) of all blocks and heads; with chains, of this key block's chain."""
        args, cfg = context.args, context.cfg
        if not cfg.chained:
            return args.dq_sum, args.semaphores
        chain = dq_block(self.n_block, self.mask, cfg)[0] % cfg.chains_of(args)
        return args.dq_sum[None, None, None, chain], args.semaphores[None, None, chain]


def work_tile(context: Sm90StepsContext) -> Sm90BackwardWork:
    """Return this CTA's work."""
    cfg, order, keys = context.cfg, context.args.order, cta_keys(context)
    neighbours = None
    if cfg.staggered:
        rank = keys.n_block % cfg.concurrent_blocks
        concurrent = (keys.k.count + cfg.cluster_tile_n - 1) // cfg.cluster_tile_n - (keys.n_block - rank)
        neighbours = Neighbours(rank, cutlass.min(concurrent, cfg.concurrent_blocks), Int32(cfg.most_apart))
    tile = Tile(keys.n_block, keys.head_kv, keys.batch)
    if cfg.parted:
        keys = part_of(keys, cute.size(context.args.key_sums, mode=[4]), cfg.group)
    # The CTAs of a cluster iterate together; each has a block of its keys.
    n_block, mask = keys.n_block * cfg.ctas + order.rank, replace(keys.mask, tile_n=cfg.cta_tile_n)
    full_first, full_stop = whole_blocks(mask, n_block, keys.first, keys.stop)
    if keys.block_iter is not None:
        full_first, full_stop = keys.block_iter.masked, keys.stop
    ascends = reverse = None
    if cfg.folds:
        assert isinstance(order, Order)
        ascends = order.starts_at_last_row(tile)
        reverse = reverse_flag(ascends, Int32(0), cfg.group)
    finished = FinishedBlocks.of(mask, n_block) if cfg.last_finishes else None
    keys = keys._replace(n_block=n_block, mask=mask)
    return Sm90BackwardWork(*keys, full_first, full_stop, neighbours, ascends, tile.head, reverse, finished)


def part_of(keys: KeyBlock, parts: Int32, group: int) -> KeyBlock:
    """Return a CTA's part of a key block: of every query head, a run of the query blocks. `head_kv` of `keys` counts
    the parts of all heads."""
    head, part = keys.head_kv // parts, keys.head_kv % parts
    first, blocks = keys.first, keys.stop - keys.first
    begin, end = first + blocks * part // parts, first + blocks * (part + 1) // parts
    head, begin, end = (cute.arch.make_warp_uniform(x) for x in (head, begin, end))
    return keys._replace(head_kv=head, first=begin, stop=end, steps=(end - begin) * group)


def dq_block(n_block: Int32, mask: Band, cfg) -> tuple[Int32, Band]:
    """Return the block of keys whose dQ is added at once, that of a cluster, and the mask of such blocks."""
    return n_block // cfg.ctas, replace(mask, tile_n=cfg.cluster_tile_n)


def reverse_flag(ascends: Int32, member: Int32, group: int) -> Int32:
    """Return 1 if the steps of a query head go from its last query block to the first, else 0.

    A key block has two steps fewer than the key block before it, so it gains two steps on that block with each head. If
    the blocks start together, the later block is 2, 4, 6, ... steps behind in forward heads, and two fewer in reversed
    heads. If they end together, the same holds counted from the end. A small lag saves L2 traffic, but ordered
    additions need a lag of at least two steps.
    """
    if group == 1:
        return ascends
    is_forward = cutlass.select_(ascends == 1, member != group - 1, member == 0)
    return Int32(cutlass.select_(is_forward, Int32(0), Int32(1)))


class WarpgroupSteps(NamedTuple):
    """Steps of one consumer: first <= i < stop of its CTA's steps; in the other steps no query sees its keys. Steps
    full_first <= i < full_stop are unmasked."""

    first: Int32
    full_first: Int32
    full_stop: Int32
    stop: Int32

    def partial(self, half: Int32, first: Int32) -> tuple[Int32, Int32]:
        """Return the range of partially masked steps from `first` on; half 0: before the unmasked, half 1: after."""
        begin = cutlass.select_(half == 0, first, cutlass.max(first, self.full_stop))
        return Int32(begin), Int32(cutlass.select_(half == 0, self.full_first, self.stop))

    def full(self, half: Int32, first: Int32, no_step: Int32) -> tuple[Int32, Int32]:
        """Return the range of unmasked steps from `first` on, all in half 0. no_step: no step is before it."""
        end = cutlass.select_(half == 0, self.full_stop, no_step)
        return cutlass.max(first, self.full_first), Int32(end)


def warpgroup_steps(work: Sm90BackwardWork) -> WarpgroupSteps:
    """Return the steps of a consumer that takes part in every step of its CTA."""
    steps = WarpgroupSteps(work.first, work.full_first, work.full_stop, work.stop)
    return in_direction(work, steps)._replace(first=work.first, stop=work.stop)


def in_direction(work: Sm90BackwardWork, steps: WarpgroupSteps) -> WarpgroupSteps:
    """Return steps that are given as query blocks, in the direction of `work`."""
    if work.reverse is None:
        return steps
    last = work.first + work.stop
    return WarpgroupSteps(*(at + work.reverse * (last - at - other) for at, other in zip(steps, reversed(steps))))


def whole_blocks(mask: Band, n_block: Int32, first: Int32, stop: Int32) -> tuple[Int32, Int32]:
    """Return the range of the query blocks first <= m < stop whose queries all see all keys of a block."""
    sees_last, _ = mask.queries((n_block + 1) * mask.tile_n - 1)
    _, misses_first = mask.queries(n_block * mask.tile_n)
    full_first = (cutlass.max(sees_last, 0) + mask.tile_m - 1) // mask.tile_m
    # A block of keys that ends behind the last key is always masked.
    full_first = cutlass.select_((n_block + 1) * mask.tile_n <= mask.seqlen_k, full_first, stop)
    full_first = cutlass.max(cutlass.min(Int32(full_first), stop), first)
    full_stop = stop
    if mask.left is not None:
        full_stop = cutlass.max(misses_first, 0) // mask.tile_m
        full_stop = cutlass.max(cutlass.min(full_stop, stop), full_first)
    return full_first, full_stop
