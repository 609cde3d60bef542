"""Which keys a query sees, asked by block and by element.

Query i of a sequence sees key j when shift - left <= j - i <= shift + right, with shift = seqlen_k - seqlen_q, so
that the last query is aligned with the last key. Whether a side is bounded is known at compile time; the bounds
are run-time values, so every window size shares one kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from .constant import Constant


class Blocks(NamedTuple):
    """Blocks [first, stop) hold something visible; of these, [full_first, full_stop) hold nothing hidden."""

    first: Int32
    full_first: Int32
    full_stop: Int32
    stop: Int32

    def part(self, index: Int32, count: Int32, size: Int32 | None = None) -> Blocks:
        """The index-th of `count` nearly equal shares; with `size`, those of blocks index * size to (index + 1) * size
        that are here. Some may be empty."""
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
    """A walk over key blocks from last to first. A place of the walk is the block's number."""

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

    def iteration(self, place: Int32) -> Int32:
        """How many places were before."""
        return self.blocks.stop - 1 - place

    def ahead(self, place: Int32, steps: int) -> Int32:
        return place - steps

    def exists(self, place: Int32) -> Boolean:
        return place >= self.blocks.first

    def block(self, place: Int32) -> Int32:
        return place


@dataclass(frozen=True)
class SparseBlocks(Constant):
    """A walk over the tiles in the blocks of two lists: first those to mask, then those seen whole. A place of the walk
    is the number of places before.

    ratio: tiles of a block. masked, count: places of the first list, and of both. cut: 1 if the last place is one of a
    block that is called whole, and the listed side ends in it; else 0.
    """

    lists: cute.Tensor
    full_lists: cute.Tensor
    masked: Int32
    count: Int32
    cut: Int32
    ratio: cutlass.Constexpr[int]

    @staticmethod
    def of(
        blocks: Any,
        sequence: Int32,
        head: Int32,
        row: Int32,
        ratio: int,
        extent: Int32,
        tile: int,
        exists: Boolean | None = None,
    ) -> SparseBlocks:
        """The lists of a `core.traced.BlockTensors` for a sequence, a query head and a block of the listing side.

        extent, tile: the listed side's rows, and those of a tile of it. Its last block may have fewer tiles than
        others; in its list, ascending, it is the last. exists: where sequences may end before the lists do, whether the
        listing side has rows in this block; whole warps then look for the entries that the listed side has rows in.
        """
        tiles = (extent + tile - 1) // tile
        shape, last = blocks.counts.shape, (tiles + ratio - 1) // ratio - 1
        row = row if exists is None else cutlass.min(row, shape[2] - 1)
        at = cutlass.min(sequence, shape[0] - 1), cutlass.min(head, shape[1] - 1), row
        places = []
        for counts, lists in ((blocks.counts, blocks.lists), (blocks.full_counts, blocks.full_lists)):
            count = counts[at]
            if exists is not None:
                count = Int32(cutlass.select_(exists, count, Int32(0)))
                count = entries_below(last + 1, lists[(*at, None)], count)
            ends = (count > 0) & (lists[(*at, cutlass.max(count - 1, 0))] == last)
            places.append(count * ratio - Int32(cutlass.select_(ends, (last + 1) * ratio - tiles, Int32(0))))
        masked, full = places
        cut = Int32(cutlass.select_(ends & (tiles * tile > extent), Int32(1), Int32(0)))  # by the last of the two lists
        return SparseBlocks(
            blocks.lists[(*at, None)], blocks.full_lists[(*at, None)], masked, masked + full, cut, ratio
        )

    def any(self) -> Boolean:
        return self.count > 0

    def start(self) -> Int32:
        return Int32(0)

    def last(self) -> Int32:
        return self.count - 1

    def iteration(self, place: Int32) -> Int32:
        return place

    def ahead(self, place: Int32, steps: int) -> Int32:
        return place + steps

    def exists(self, place: Int32) -> Boolean:
        return place < self.count

    def block(self, place: Int32) -> Int32:
        """The number of the tile at a place."""
        # Both lists are read through one pointer: a branch would keep everybody from asking ahead.
        between = (self.full_lists.iterator.toint() - self.lists.iterator.toint()) // 4
        within = cutlass.max(cutlass.min(place, self.count - 1), 0)
        of_full = within - self.masked
        own = cutlass.select_(of_full < 0, Int64(within // self.ratio), between + of_full // self.ratio)
        entry = (self.lists.iterator + Int64(own)).load()
        return entry * self.ratio + within % self.ratio


@cute.jit
def entries_below(bound: Int32, entries: cute.Tensor, count: Int32) -> Int32:
    """How many of the first `count` ascending entries are less than a bound, by a whole warp."""
    lane, found, left = cute.arch.lane_idx(), Int32(0), count
    while left > 0:
        # Each lane looks at the last entry of a share; the first share whose last is too large is looked at again.
        share = (left + 31) // 32
        place = (lane + 1) * share - 1
        is_below = (place < left) & (entries[found + cutlass.min(place, left - 1)] < bound)
        below = cute.arch.popc(cute.arch.vote_ballot_sync(is_below)) * share
        found, left = found + below, cutlass.min(share - 1, left - below)
    return found


class Mask(Protocol):
    """Which keys the queries of one sequence see, asked by tiles of `tile_m` query rows and `tile_n` keys."""

    def key_blocks(self, m_block: Int32) -> Blocks:
        """The key blocks that a block of query rows meets."""

    def query_blocks(self, n_block: Int32) -> tuple[Int32, Int32]:
        """[first, stop): the blocks of query rows that see some key of a block: exactly those that meet it."""

    def cuts(self, m_block: Int32, n_block: Int32) -> Boolean:
        """Whether some query of the tile misses some of its keys, so that elements must be compared."""

    def keys(self, query: Int32) -> tuple[Int32, Int32]:
        """[first, stop): the keys that a query sees."""

    def queries(self, key: Int32) -> tuple[Int32, Int32]:
        """[first, stop): the queries that see a key; the last of them may lie beyond the last query."""


class Window(NamedTuple):
    """How far a query sees to each side of the key that it is aligned with; None for an open side."""

    left: Int32 | None
    right: Int32 | None


@dataclass(frozen=True)
class Band:
    """The diagonal band of one sequence: the `Mask` of causal and windowed attention, and of no mask at all.

    `group` query rows in turn share a query position: 1, or the heads of a GQA group packed into the rows of a tile.
    `left` and `right` are None for an open side.
    """

    tile_m: cutlass.Constexpr[int]
    tile_n: cutlass.Constexpr[int]
    seqlen_q: Int32
    seqlen_k: Int32
    left: Int32 | None
    right: Int32 | None
    group: cutlass.Constexpr[int] = 1

    def first_key(self, query: Int32) -> Int32:
        """The first key that a query sees."""
        if self.left is None:
            return Int32(0)
        return cutlass.max(query + self.seqlen_k - self.seqlen_q - self.left, 0)

    def stop_key(self, query: Int32) -> Int32:
        """One past the last key that a query sees."""
        if self.right is None:
            return self.seqlen_k
        return cutlass.min(query + self.seqlen_k - self.seqlen_q + self.right + 1, self.seqlen_k)

    def keys(self, query: Int32) -> tuple[Int32, Int32]:
        """[first, stop): the keys that a query sees."""
        return self.first_key(query), self.stop_key(query)

    def queries(self, key: Int32) -> tuple[Int32, Int32]:
        """[first, stop): the queries that see a key; the last of them may lie beyond the last query."""
        diagonal = key - (self.seqlen_k - self.seqlen_q)  # the query aligned with this key
        first = Int32(0) if self.right is None else diagonal - self.right
        stop = Int32(1 << 30) if self.left is None else diagonal + self.left + 1
        return first, Int32(cutlass.select_(key < self.seqlen_k, stop, first))

    def key_blocks(self, m_block: Int32) -> Blocks:
        """The key blocks that a block of query rows meets."""
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
        """[first, stop): the blocks of query rows that see some key of a block."""
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
            # Rows beyond the last query may belong to its block, and see more keys than it does (right < 0).
            first += cutlass.min(cutlass.max(begin - self.seqlen_q + 1, 0), 1)
        return first, cutlass.max(stop, first)

    def cuts(self, m_block: Int32, n_block: Int32) -> Boolean:
        """Whether some query of the tile misses some of its keys, so that elements must be compared."""
        first_query = m_block * self.tile_m // self.group
        last_query = cutlass.min(((m_block + 1) * self.tile_m - 1) // self.group, self.seqlen_q - 1)
        cut = self.stop_key(first_query) < (n_block + 1) * self.tile_n
        if self.left is not None:
            cut = cut | (self.first_key(last_query) > n_block * self.tile_n)
        return cut

    def apply_mask(
        self, scores: cute.Tensor, own: cute.Tensor, first: cute.Tensor, m_block: Int32, n_block: Int32
    ) -> None:
        """Set scores (rows, columns) of a thread to -inf where the query does not see the key.

        own: the thread's (row, column) in the tile for each score. first: the same of the tile's first thread, whose
        columns are compile-time numbers: comparing against them takes one instruction.
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
