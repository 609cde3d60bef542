"""The order in which tiles are worked on: blocks of rows by (head, sequence) pairs, in sections.

A section is a run of neighbouring pairs. Within it the block of rows changes slowest, so the pairs of a section advance
together: with longest blocks first the short ones fill the end, and blocks that must add to the same rows in turn are
spread over time. A section that fits the L2 cache keeps what its pairs share there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Tile(NamedTuple):
    block: Int32
    head: Int32
    sequence: Int32


@dataclass(frozen=True)
class Order:
    """All tiles of a grid, numbered in the order of work.

    section: pairs that advance together; None takes the heads of a sequence, which is a section of `heads`.
    descending: from the last block to the first. cluster: CTAs that share a tile. wave: blocks of a pair that begin
    together; waves then descend, and of all waves, section by section, in every other one the blocks ascend. listed:
    (batch or 1, heads or 1, blocks), each pair's blocks in their order, in place of descending. most_l2_groups: the last
    of which has all pairs that are left; None for as many as there are.
    """

    blocks: Int32
    heads: Int32
    batch: Int32
    l2_group: Int32 | None = None
    descending: cutlass.Constexpr[bool] = False
    cluster: cutlass.Constexpr[int] = 1
    wave: Int32 | None = None
    listed: cute.Tensor | None = None
    most_l2_groups: Int32 | None = None

    @property
    def tiles(self) -> Int32:
        return self.blocks * self.heads * self.batch

    @property
    def ctas(self) -> Int32:
        """The size of a grid that has a CTA (or cluster of them) for each tile."""
        return self.tiles * self.cluster

    @property
    def rank(self) -> Int32:
        """Of this CTA in its cluster."""
        return Int32(0) if self.cluster == 1 else Int32(cute.arch.block_idx()[0]) % self.cluster

    @property
    def stride(self) -> Int32:
        """Tiles that are worked on at a time."""
        return Int32(cute.arch.grid_dim()[0]) // self.cluster

    def here(self) -> Tile:
        """The tile of this CTA, where each has one."""
        return self.at(Int32(cute.arch.block_idx()[0]) // self.cluster)

    def at(self, index: Int32) -> Tile:
        """The index-th tile."""
        if self.l2_group is None:
            per_sequence = self.blocks * self.heads
            sequence, within = index // per_sequence, index % per_sequence
            block, head = within // self.heads, within % self.heads
        else:
            number, room = index // (self.blocks * self.l2_group), self.l2_group
            if self.most_l2_groups is not None:
                number = cutlass.min(number, self.most_l2_groups - 1)
                room += cutlass.max(number + 2 - self.most_l2_groups, 0) * self.heads * self.batch  # 0 but in the last
            first_pair = number * self.l2_group
            pairs = cutlass.min(room, self.heads * self.batch - first_pair)  # the last section may be narrower
            within = index - first_pair * self.blocks
            block, pair = within // pairs, first_pair + within % pairs
            head, sequence = pair % self.heads, pair // self.heads
        if self.listed is not None:
            shape = self.listed.shape
            block = self.listed[cutlass.min(sequence, shape[0] - 1), cutlass.min(head, shape[1] - 1), block]
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
        """How many of a pair's blocks first <= b < stop, of which the tile's is one, are to add to the same rows before
        it: in the order of work."""
        block = tile.block
        if self.wave is None:
            return stop - 1 - block if self.descending else block - first
        index = (self.blocks - 1 - block) // self.wave
        begin, end = self._wave(index)
        begin, end = cutlass.max(begin, first), cutlass.min(end, stop)
        descending, ascending = end - 1 - block, block - begin
        return stop - end + descending + self._ascends(index, tile.head, tile.sequence) * (ascending - descending)

    def goes_back(self, tile: Tile) -> Int32:
        """1 if a causal problem's blocks of keys, of which the tile is one, are to begin at the last row; else 0.

        ReverseRange blocks, the shortest first, begin at the same time, each at its diagonal: there the last block leads
        and ends first, and so on. Then the next section's longest may begin, so that its blocks start one after the
        other and end at the same time; from the last row back, each finds the one before ahead.
        """
        return self._ascends(0, tile.head, tile.sequence)

    def _ascends(self, wave: Int32 | int, head: Int32, sequence: Int32) -> Int32:
        """1 or 0: of all waves, every other one."""
        return ((sequence * self.heads + head) // self.l2_group + wave) % 2

    def _wave(self, index: Int32) -> tuple[Int32, Int32]:
        """[first, stop): the blocks of a wave."""
        stop = self.blocks - index * self.wave
        return cutlass.max(stop - self.wave, 0), stop


def listed_order(cfg: Any, blocks: Any, rows: int, tile: int) -> cute.Tensor | None:
    """The order of a block mask's listing blocks of `rows`, if tiles of a grid are such blocks.

    Not of packed sequences, which have fewer, nor where blocks take turns in the order of their numbers.

    blocks: `core.traced.BlockTensors`.
    """
    is_fixed = cfg.varlen or cfg.deterministic or cfg.lists_by_head
    return None if is_fixed or rows != tile else blocks.order


_NONE = 1 << 20  # a block that no sequence has
EVEN = 0.006  # of all work, that a CTA may have more than the others


@dataclass(frozen=True)
class PackedOrder:
    """All tiles of packed sequences, numbered sequence by sequence in the order of work; few of them hold nothing.

    The sequence that begins at row a and ends at row b gets the blocks from a // rows to b // rows, both included: as
    many as its rows need, or one more. How many there are in all follows from the number of rows and of sequences, so
    nothing must be read back to launch a grid.

    rows: of a block. per_query: rows that each row of `cu_seqlens` stands for. total: rows of all sequences, or more.
    section: heads of a sequence that advance together. descending, cluster: as in `Order`.
    """

    rows: cutlass.Constexpr[int]
    per_query: cutlass.Constexpr[int]
    cu_seqlens: cute.Tensor
    total: Int32
    heads: Int32
    l2_group: Int32
    descending: cutlass.Constexpr[bool] = True
    cluster: cutlass.Constexpr[int] = 1

    ctas, rank, stride, here = Order.ctas, Order.rank, Order.stride, Order.here

    @property
    def sequences(self) -> Int32:
        return Int32(cute.size(self.cu_seqlens)) - 1

    @property
    def tiles(self) -> Int32:
        return (self.total * self.per_query // self.rows + self.sequences) * self.heads

    def first_block(self, sequence: Int32) -> Int32:
        """Blocks of the sequences before this one."""
        return self.cu_seqlens[sequence] * self.per_query // self.rows + sequence

    def at(self, index: Int32) -> Tile:
        """The index-th tile; one that no sequence has is a block past the end of the last."""
        sequence = _last_not_after(self, index // self.heads)
        first = self.first_block(sequence)
        blocks = self.first_block(sequence + 1) - first
        within = index - first * self.heads
        last = blocks * self.heads - 1
        order = Order(blocks, self.heads, Int32(1), self.l2_group, self.descending)
        block, head, _ = order.at(cutlass.min(within, last))
        return Tile(Int32(cutlass.select_(within > last, Int32(_NONE), block)), head, sequence)


@cute.jit
def _last_not_after(order: PackedOrder, block: Int32) -> Int32:
    """The last sequence whose blocks begin at `block` or before."""
    found, stop = Int32(0), order.sequences
    while stop - found > 1:
        middle = (found + stop) // 2
        is_after = order.first_block(middle) > block
        found = Int32(cutlass.select_(is_after, found, middle))
        stop = Int32(cutlass.select_(is_after, middle, stop))
    return found


def even_l2_group(fit: int, pairs: int) -> int:
    """How many of all pairs advance together if so many fit: a divisor where one is near. A last section of few pairs
    would begin with long tiles, fewer than the chip has places, when nothing is left to do beside them."""
    fit = max(1, min(fit, pairs))
    return next((size for size in range(fit, fit // 2, -1) if pairs % size == 0), fit)


def even_l2_groups(l2_group: int, pairs: int, largest: int, lengths: Sequence[int], places: int) -> int:
    """How many sections all pairs make on a grid of `places` CTAs that goes to and fro through them, if a section is
    whole rounds; largest: pairs of the last one. lengths: of a pair's tiles, in their order.

    What is left over after the others may be shared unevenly, half a round of a section's longest and shortest tiles
    say. Then more pairs belong to the last section, as many as make that even.
    """
    rest, most = pairs % l2_group, -(-pairs // l2_group)
    if rest == 0:
        return most
    enough = EVEN * pairs * sum(lengths) / places
    least, found = math.inf, most
    for more in range(max((largest - rest) // l2_group, 0) + 1):
        unevenness = _unevenness(rest + more * l2_group, lengths, places)
        if unevenness < least:
            least, found = unevenness, most - more
        if least < enough:
            break
    return found


def _unevenness(pairs: int, lengths: Sequence[int], places: int) -> float:
    """By how much the CTA with the most work has more than the average one."""
    work = [0] * places
    for i in range(pairs * len(lengths)):
        lap, place = divmod(i, places)
        work[places - 1 - place if lap % 2 else place] += lengths[i // pairs]
    return max(work) - sum(work) / places
