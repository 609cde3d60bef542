"""Tile schedulers: the order of tiles (row block, head, sequence), in L2 swizzle groups.

An L2 group is a run of consecutive (head, sequence) pairs. Within it the row block changes slowest, so the pairs of a
group advance together. With the longest blocks first, short blocks fill the end. Blocks that add to the same rows in a
fixed order are spread over time. If a group fits into the L2 cache, the data that its pairs share stays there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .traced import ModTensors
from .variant import Variant


class Tile(NamedTuple):
    block: Int32
    head: Int32
    sequence: Int32


class Grid:
    """Base of an order: the grid that it needs, and the tile of a CTA. A subclass has the field `cluster`."""

    cluster: int

    @property
    def tiles(self) -> Int32:
        raise NotImplementedError

    def at(self, index: Int32) -> Tile:
        """Return the index-th tile."""
        raise NotImplementedError

    @property
    def ctas(self) -> Int32:
        """Grid size with one CTA (or cluster) per tile."""
        return self.tiles * self.cluster

    @property
    def rank(self) -> Int32:
        """Rank of this CTA in its cluster."""
        return Int32(0) if self.cluster == 1 else Int32(cute.arch.block_idx()[0]) % self.cluster

    @property
    def stride(self) -> Int32:
        """Number of tiles in flight: the step to a CTA's next tile."""
        return Int32(cute.arch.grid_dim()[0]) // self.cluster

    def here(self) -> Tile:
        """Tile of this CTA, in a grid with one CTA (or cluster) per tile."""
        return self.at(Int32(cute.arch.block_idx()[0]) // self.cluster)


@dataclass(frozen=True)
class Order(Grid):
    """All tiles of a grid, numbered in launch order.

    l2_group: pairs that advance together; None for the heads of one sequence. descending: from the last block to the
    first. cluster: CTAs that share a tile. wave: blocks of a pair that start together. Waves descend; counted group by
    group, the blocks of every second wave ascend. listed: (batch or 1, heads or 1, blocks), the block order of each
    pair; it replaces `descending`. most_l2_groups: maximum number of groups, the last has all remaining pairs; None for
    no limit.
    """

    blocks: Int32
    heads: Int32
    batch: Int32
    l2_group: Int32 | None = None
    descending: cutlass.Constexpr[bool] = False
    cluster: cutlass.Constexpr[int] = 1
    wave: Int32 | None = None
    block_order: cute.Tensor | None = None
    most_l2_groups: Int32 | None = None

    @property
    def tiles(self) -> Int32:
        return self.blocks * self.heads * self.batch

    def at(self, index: Int32) -> Tile:
        if self.l2_group is None:
            per_sequence = self.blocks * self.heads
            sequence, within = index // per_sequence, index % per_sequence
            block, head = within // self.heads, within % self.heads
        else:
            group, size = index // (self.blocks * self.l2_group), self.l2_group
            if self.most_l2_groups is not None:
                group = cutlass.min(group, self.most_l2_groups - 1)
                size += cutlass.max(group + 2 - self.most_l2_groups, 0) * self.heads * self.batch  # last group only
            first_pair = group * self.l2_group
            pairs = cutlass.min(size, self.heads * self.batch - first_pair)  # the last group may be smaller
            within = index - first_pair * self.blocks
            block, pair = within // pairs, first_pair + within % pairs
            head, sequence = pair % self.heads, pair // self.heads
        if self.block_order is not None:
            shape = self.block_order.shape
            block = self.block_order[cutlass.min(sequence, shape[0] - 1), cutlass.min(head, shape[1] - 1), block]
        elif self.wave is not None:
            index = block // self.wave
            first, stop = self._wave(index)
            descending = stop - 1 - block % self.wave
            ascending = first + block % self.wave
            block = descending + self._ascends(index, head, sequence) * (ascending - descending)
        elif self.descending:
            block = self.blocks - 1 - block
        return Tile(block, head, sequence)

    def order_index(self, tile: Tile, first: Int32, stop: Int32) -> Int32:
        """Number of the pair's blocks in [first, stop) that precede the tile's block in launch order: its place in the
        order of additions to the same rows."""
        block = tile.block
        if self.wave is None:
            return stop - 1 - block if self.descending else block - first
        index = (self.blocks - 1 - block) // self.wave
        begin, end = self._wave(index)
        begin, end = cutlass.max(begin, first), cutlass.min(end, stop)
        descending, ascending = end - 1 - block, block - begin
        return stop - end + descending + self._ascends(index, tile.head, tile.sequence) * (ascending - descending)

    def starts_at_last_row(self, tile: Tile) -> Int32:
        """1 if the pair's key blocks of a causal problem must start at the last query row; else 0.

        Descending key blocks (shortest first) start together, each at its diagonal. The last block leads and ends
        first, then the one before it, and so on. As they end, the blocks of the next group (longest first) start one
        after the other and end together. If they go from the last row backwards, each block follows the previous one.
        """
        return self._ascends(0, tile.head, tile.sequence)

    def _ascends(self, wave: Int32 | int, head: Int32, sequence: Int32) -> Int32:
        """1 for every second wave, counted over all groups; else 0."""
        return ((sequence * self.heads + head) // self.l2_group + wave) % 2

    def _wave(self, index: Int32) -> tuple[Int32, Int32]:
        """[first, stop): blocks of a wave."""
        stop = self.blocks - index * self.wave
        return cutlass.max(stop - self.wave, 0), stop


def sparse_block_order(cfg: Variant, mods: ModTensors | None, axis: int, tile: int) -> cute.Tensor | None:
    """Return the order of a block mask's listing blocks if they are the tiles (`tile` rows each) of a grid.

    None otherwise, without a block mask, for varlen (a sequence has fewer blocks) and if additions follow the order of
    block numbers. axis: 0 if blocks of queries list blocks of keys, 1 in a backward.
    """
    is_fixed = cfg.varlen or cfg.deterministic or cfg.lists_by_head
    return None if not cfg.has_blocks or is_fixed or cfg.mods.block[axis] != tile else mods.blocks.order


_NONE = 1 << 20  # block index beyond every sequence


@dataclass(frozen=True)
class PackedOrder(Grid):
    """All tiles of varlen sequences, numbered by sequence in launch order. A few tiles may be empty.

    A sequence from row a to row b gets blocks a // rows to b // rows, both included: at most one more than it needs.
    The total follows from the number of rows and of sequences, so a launch reads nothing back from the device.

    rows: rows per block. per_query: tile rows per row of `cu_seqlens`. total: rows of all sequences, or more. l2_group:
    heads of a sequence that advance together; None for all. descending, cluster: as in `Order`.
    """

    rows: cutlass.Constexpr[int]
    per_query: cutlass.Constexpr[int]
    cu_seqlens: cute.Tensor
    total: Int32
    heads: Int32
    l2_group: Int32 | None = None
    descending: cutlass.Constexpr[bool] = False
    cluster: cutlass.Constexpr[int] = 1

    @property
    def sequences(self) -> Int32:
        return Int32(cute.size(self.cu_seqlens)) - 1

    @property
    def tiles(self) -> Int32:
        return (self.total * self.per_query // self.rows + self.sequences) * self.heads

    def first_block(self, sequence: Int32) -> Int32:
        """Number of blocks of all earlier sequences."""
        return self.cu_seqlens[sequence] * self.per_query // self.rows + sequence

    def at(self, index: Int32) -> Tile:
        """Return the index-th tile. A tile of no sequence has a block index beyond every sequence."""
        sequence = _last_not_after(self, index // self.heads)
        first = self.first_block(sequence)
        blocks = self.first_block(sequence + 1) - first
        within = index - first * self.heads
        last = blocks * self.heads - 1
        order = Order(blocks, self.heads, Int32(1), self.l2_group, self.descending)
        block, head, _ = order.at(cutlass.min(within, last))
        return Tile(Int32(cutlass.select_(within > last, Int32(_NONE), block)), head, sequence)


def tile_order(
    rows: int,
    per_query: int,
    longest: Int32,
    total: Int32,
    cu_seqlens: cute.Tensor | None,
    heads: Int32,
    batch: Int32,
    l2_group: Int32 | None = None,
    *,
    descending: bool = False,
    cluster: int = 1,
    wave: Int32 | None = None,
    block_order: cute.Tensor | None = None,
    most_l2_groups: Int32 | None = None,
) -> Order | PackedOrder:
    """Return the order of a launch's tiles: a `PackedOrder` if `cu_seqlens` is given, else the same number of tiles for
    each sequence.

    rows, per_query: as in `PackedOrder`. longest: rows of the longest sequence. total: rows of all sequences. Other
    arguments: as in `Order`; a `PackedOrder` uses none after `cluster`.
    """
    if cu_seqlens is not None:
        return PackedOrder(rows, per_query, cu_seqlens, total, heads, l2_group, descending, cluster)
    blocks = cute.ceil_div(longest * per_query, rows)
    return Order(blocks, heads, batch, l2_group, descending, cluster, wave, block_order, most_l2_groups)


@cute.jit
def _last_not_after(order: PackedOrder, block: Int32) -> Int32:
    """Binary search: the last sequence whose first block is not after `block`."""
    found, stop = Int32(0), order.sequences
    while stop - found > 1:
        middle = (found + stop) // 2
        is_after = order.first_block(middle) > block
        found = Int32(cutlass.select_(is_after, found, middle))
        stop = Int32(cutlass.select_(is_after, middle, stop))
    return found
