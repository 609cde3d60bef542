"""Attention masks by block and by element, and iterators over the blocks that a mask leaves.

Query i of a sequence attends to key j if shift - left <= j - i <= shift + right, with shift = seqlen_k - seqlen_q: the
last query is aligned with the last key. Whether a side is bounded is a compile-time choice. The bounds are run-time
values, so all window sizes share one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from .constant import Constant

if TYPE_CHECKING:
    from .traced import BlockTensors


class Blocks(NamedTuple):
    """Blocks [first, stop) hold unmasked elements; of these, [full_first, full_stop) hold no masked element."""

    first: Int32
    full_first: Int32
    full_stop: Int32
    stop: Int32

    def part(self, index: Int32, count: Int32, size: Int32 | None = None) -> Blocks:
        """Return the index-th of `count` nearly equal shares, which may be empty. With `size`, return the part of these
        blocks in [index * size, (index + 1) * size)."""
        if size is None:
            share = (self.stop - self.first + count - 1) // count
            first = cutlass.min(self.first + index * share, self.stop)
            stop = cutlass.min(first + share, self.stop)
        else:
            first = cutlass.max(cutlass.min(index * size, self.stop), self.first)
            stop = cutlass.max(cutlass.min((index + 1) * size, self.stop), first)

        def within(block: Int32) -> Int32:
            return cutlass.max(cutlass.min(block, stop), first)

        return Blocks(first, within(self.full_first), within(self.full_stop), stop)


@dataclass(frozen=True)
class ReverseRange(Constant):
    """Iterator over key blocks from last to first. A position `pos` is a block index."""

    blocks: Blocks

    @property
    def count(self) -> Int32:
        return self.blocks.stop - self.blocks.first

    def any(self) -> Boolean:
        return self.blocks.first < self.blocks.stop

    def start(self) -> Int32:
        return self.blocks.stop - 1

    def last(self) -> Int32:
        return self.blocks.first

    def iteration(self, pos: Int32) -> Int32:
        """Number of iterations before `pos`."""
        return self.blocks.stop - 1 - pos

    def ahead(self, pos: Int32, steps: int) -> Int32:
        return pos - steps

    def exists(self, pos: Int32) -> Boolean:
        return pos >= self.blocks.first

    def block(self, pos: Int32) -> Int32:
        return pos


@dataclass(frozen=True)
class SparseBlocks(Constant):
    """Iterator over the tiles of two lists of blocks: first the blocks to mask, then the full blocks. A position `pos`
    is the number of iterations before it.

    ratio: tiles per block. masked, count: tiles of the first list, and of both lists. cut: 1 if the last tile is in a
    full block but the listed side ends inside this tile; else 0.
    """

    lists: cute.Tensor
    full_lists: cute.Tensor
    masked: Int32
    count: Int32
    cut: Int32
    ratio: cutlass.Constexpr[int]

    @staticmethod
    def of(
        blocks: BlockTensors,
        sequence: Int32,
        head: Int32,
        row: Int32,
        ratio: int,
        extent: Int32,
        tile: int,
        exists: Boolean | None = None,
    ) -> SparseBlocks:
        """Return the lists of a sequence, a query head and block `row` of the listing side.

        extent, tile: rows of the listed side, and of one of its tiles. The last block may have fewer tiles; it is the
        last entry of an ascending list. exists: whether the listing side has rows in this block; None if no sequence
        ends before the lists do. If given, whole warps search for the entries in which the listed side has rows.
        """
        tiles = (extent + tile - 1) // tile
        shape, last = blocks.counts.shape, (tiles + ratio - 1) // ratio - 1
        row = row if exists is None else cutlass.min(row, shape[2] - 1)
        index = cutlass.min(sequence, shape[0] - 1), cutlass.min(head, shape[1] - 1), row
        tile_counts = []
        for counts, lists in ((blocks.counts, blocks.lists), (blocks.full_counts, blocks.full_lists)):
            count = counts[index]
            if exists is not None:
                count = Int32(cutlass.select_(exists, count, Int32(0)))
                count = entries_below(last + 1, lists[(*index, None)], count)
            has_last = (count > 0) & (lists[(*index, cutlass.max(count - 1, 0))] == last)
            tile_counts.append(count * ratio - Int32(cutlass.select_(has_last, (last + 1) * ratio - tiles, Int32(0))))
        masked, full = tile_counts
        cut = Int32(cutlass.select_(has_last & (tiles * tile > extent), Int32(1), Int32(0)))  # for the second list
        return SparseBlocks(
            blocks.lists[(*index, None)], blocks.full_lists[(*index, None)], masked, masked + full, cut, ratio
        )

    def any(self) -> Boolean:
        return self.count > 0

    def start(self) -> Int32:
        return Int32(0)

    def last(self) -> Int32:
        return self.count - 1

    def iteration(self, pos: Int32) -> Int32:
        return pos

    def ahead(self, pos: Int32, steps: int) -> Int32:
        return pos + steps

    def exists(self, pos: Int32) -> Boolean:
        return pos < self.count

    def block(self, pos: Int32) -> Int32:
        """Tile index at a position; `pos` is clamped to the last one."""
        # Read both lists through one pointer: with a branch, callers could not load entries early.
        offset_of_full = (self.full_lists.iterator.toint() - self.lists.iterator.toint()) // 4
        clamped = cutlass.max(cutlass.min(pos, self.count - 1), 0)
        full_pos = clamped - self.masked
        index = cutlass.select_(full_pos < 0, Int64(clamped // self.ratio), offset_of_full + full_pos // self.ratio)
        entry = (self.lists.iterator + Int64(index)).load()
        return entry * self.ratio + clamped % self.ratio


BlockIterator = ReverseRange | SparseBlocks
"""Iterator over the blocks of a work item: the configuration tells which."""


def range_blocks(block_iter: BlockIterator) -> Blocks:
    """Return the blocks of an iterator without a block mask."""
    assert isinstance(block_iter, ReverseRange)
    return block_iter.blocks


def sparse_blocks(block_iter: BlockIterator) -> SparseBlocks:
    """Return the iterator of a block mask."""
    assert isinstance(block_iter, SparseBlocks)
    return block_iter


@cute.jit
def entries_below(bound: Int32, entries: cute.Tensor, count: Int32) -> Int32:
    """Whole warp: count how many of the first `count` ascending entries are less than `bound`."""
    lane, found, left = cute.arch.lane_idx(), Int32(0), count
    while left > 0:
        # Each lane tests the last entry of a share. Then search the first share whose last is too large.
        share = (left + 31) // 32
        pos = (lane + 1) * share - 1
        is_below = (pos < left) & (entries[found + cutlass.min(pos, left - 1)] < bound)
        below = cute.arch.popc(cute.arch.vote_ballot_sync(is_below)) * share
        found, left = found + below, cutlass.min(share - 1, left - below)
    return found


@dataclass(frozen=True)
class Band:
    """Mask of one sequence, by tiles of `tile_m` query rows and `tile_n` keys: the diagonal band of causal,
    sliding-window and unmasked attention.

    group: consecutive query rows with the same query position: 1, or the packed heads of a GQA group (pack_gqa).
    left, right: keys to which a query attends on each side of its aligned key; None for an unbounded side.
    """

    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    seqlen_q: Int32
    seqlen_k: Int32
    left: Int32 | None
    right: Int32 | None
    group: cutlass.Constexpr[int] = 1

    def first_key(self, query: Int32) -> Int32:
        """The first key to which a query attends."""
        return Int32(0) if self.left is None else cutlass.max(self.first_of_window(query), 0)

    def first_of_window(self, query: Int32) -> Int32:
        """The first key within the left bound of a query; negative if the window begins before the keys."""
        return query + self.seqlen_k - self.seqlen_q - self.left

    def stop_key(self, query: Int32) -> Int32:
        """One past the last key to which a query attends."""
        if self.right is None:
            return self.seqlen_k
        return cutlass.min(query + self.seqlen_k - self.seqlen_q + self.right + 1, self.seqlen_k)

    def keys(self, query: Int32) -> tuple[Int32, Int32]:
        """[first, stop): the keys to which a query attends."""
        return self.first_key(query), self.stop_key(query)

    def queries(self, key: Int32) -> tuple[Int32, Int32]:
        """[first, stop): the queries that attend to a key; `stop` may be larger than the number of queries."""
        diagonal = key - (self.seqlen_k - self.seqlen_q)  # the query aligned with this key
        first = Int32(0) if self.right is None else diagonal - self.right
        stop = Int32(1 << 30) if self.left is None else diagonal + self.left + 1
        return first, Int32(cutlass.select_(key < self.seqlen_k, stop, first))

    def key_blocks(self, m_block: Int32) -> Blocks:
        """The key blocks to which a block of query rows attends."""
        first_query = m_block * self.tile_m // self.group
        last_query = cutlass.min(((m_block + 1) * self.tile_m - 1) // self.group, self.seqlen_q - 1)
        begin, end = self.first_key(first_query), cutlass.max(self.stop_key(last_query), 0)
        first = begin // self.tile_n
        stop = cutlass.max((end + self.tile_n - 1) // self.tile_n, first)
        full_stop = cutlass.max(self.stop_key(first_query), 0) // self.tile_n
        full_stop = cutlass.max(cutlass.min(full_stop, stop), first)
        full_first = (self.first_key(last_query) + self.tile_n - 1) // self.tile_n
        full_first = cutlass.max(cutlass.min(full_first, full_stop), first)
        return Blocks(first, full_first, full_stop, stop)

    def query_blocks(self, n_block: Int32) -> tuple[Int32, Int32]:
        """[first, stop): the blocks of query rows that attend to a key block: exactly those with it in `key_blocks`."""
        shift = self.seqlen_k - self.seqlen_q
        first_key = n_block * self.tile_n
        last_key = cutlass.min(first_key + self.tile_n, self.seqlen_k) - 1
        begin, end = Int32(0), self.seqlen_q
        if self.right is not None:
            begin = cutlass.max(first_key - shift - self.right, 0)
        if self.left is not None:
            end = cutlass.min(last_key - shift + self.left + 1, self.seqlen_q)
        stop = (cutlass.max(end, 0) * self.group + self.tile_m - 1) // self.tile_m
        first = begin * self.group // self.tile_m
        if self.right is not None:
            # Padding rows in the last query's block may attend to more keys than the last query (right < 0).
            first += cutlass.min(cutlass.max(begin - self.seqlen_q + 1, 0), 1)
        return first, cutlass.max(stop, first)

    def needs_mask(self, m_block: Int32, n_block: Int32) -> Boolean:
        """Whether an element of the tile may be masked, so that elements must be compared."""
        first_query = m_block * self.tile_m // self.group
        last_query = cutlass.min(((m_block + 1) * self.tile_m - 1) // self.group, self.seqlen_q - 1)
        cut = self.stop_key(first_query) < (n_block + 1) * self.tile_n
        if self.left is not None:
            cut = cut | (self.first_key(last_query) > n_block * self.tile_n)
        return cut

    def apply_mask(
        self, scores: cute.Tensor, own: cute.Tensor, first: cute.Tensor, m_block: Int32, n_block: Int32
    ) -> None:
        """Set a thread's masked scores (rows, columns) to -inf.

        own: (row, column) in the tile of each score. first: the same for the tile's first thread; its columns are
        compile-time numbers, so a comparison takes one instruction.
        """
        column = n_block * self.tile_n + own[0, 0][1]
        for r in range(cute.size(scores, mode=[0])):
            query = (m_block * self.tile_m + own[r, 0][0]) // self.group
            start, stop = (key - column for key in self.keys(query))
            for c in range(cute.size(scores, mode=[1])):
                offset = first[0, c][1] - first[0, 0][1]
                keep = offset < stop
                if self.left is not None:
                    keep = keep & (offset >= start)
                scores[r, c] = cutlass.select_(keep, scores[r, c], -Float32.inf)
