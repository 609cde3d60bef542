"""Dropout's keep bits in device code, as `mods.dropout` defines them: 32 keys of a query's row to a word.

A word costs two calls of Philox and eight instructions; threads whose elements share words therefore share the work:

- a thread that has a row to itself computes its row's words (`words`);
- four threads that share rows, each with the same two of every 8 columns, compute a word in turn and read the others'
  by shuffles (`by_quads`);
- a warp whose 32 threads have a key each computes the words of 32 queries, one to a thread, and transposes the bits
  (`by_keys`);
- where a row's columns are spread over warps the words go through shared memory (`sm80.backward_tile`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64

from .. import jit
from ..mods.dropout import BITS, KEYS, MULTIPLIERS, ROUNDS, WEYL
from .constant import Constant
from .mask_bits import is_unmasked


class DropoutTensors(NamedTuple):
    """A call's dropout at run time, as `mods.tensors.filled` gives it. seed: (2,) int64, seed and offset. bits, scale:
    see `mods.dropout.Rate`. heads: of queries."""

    seed: cute.Tensor
    bits: tuple
    scale: Float32
    heads: Int32

    @staticmethod
    def fake() -> DropoutTensors:
        """Stand-ins for compilation."""
        return DropoutTensors(jit.fake_tensor(Int64, 1, align=8), (Int32(0),) * BITS, Float32(0.0), Int32(0))


@dataclass(frozen=True)
class Dropout(Constant):
    """Of a tile's sequence, whose rows are those of `core.traced.Traced`: row i is query i // rows_per_query, and of
    `packed` heads, the first of which is `head`, the (i % rows_per_query)-th."""

    given: DropoutTensors
    key: tuple[Uint32, Uint32]
    offset: Uint32
    pair: Int32  # number of the sequence and its first head
    packed: int
    rows_per_query: int

    @staticmethod
    def of(mods: Any, filled: Any, batch: Int32, head: Int32, packed: int = 1, rows: int | None = None) -> Any:
        """That of a call, or None. mods, filled: its `ModSpec` and `core.traced.ModTensors`. rows: per query, if these
        are more than `packed`."""
        if mods is None or not mods.dropout:
            return None
        given = filled.dropout
        seed, offset = Int64(given.seed[0]), Int64(given.seed[1])
        key = Uint32(seed), Uint32(seed >> 32)
        return Dropout(given, key, Uint32(offset), batch * given.heads + head, packed, rows or packed)

    @property
    def scale(self) -> Float32:
        """What is kept is multiplied by it."""
        return self.given.scale

    def word(self, row: Int32, block: Int32) -> Int32:
        """Bit j tells whether the row keeps key 32 * block + j."""
        query, pair = row, self.pair
        if self.rows_per_query > 1:
            query, place = row // self.rows_per_query, row % self.rows_per_query
            # (rows that are none, beyond the packed heads, get numbers too, for nothing)
            pair = pair + place
        below = Int32(0)
        words = [x for half in (0, 1) for x in self._philox(Uint32(2 * block + half), Uint32(query), Uint32(pair))]
        for word, bit in zip(reversed(words), self.given.bits):
            # The lower bits' verdict stands where the bits are the same: one lop3 for 32 bytes.
            less = ~Int32(word)
            below = (below & less) | (bit & (below | less))
        return below

    def _philox(self, c0: Uint32, c1: Uint32, c2: Uint32) -> tuple:
        c3, (k0, k1) = self.offset, self.key
        for i in range(ROUNDS):
            low, high = cute.arch.mul_wide(c0, Uint32(MULTIPLIERS[0])), cute.arch.mul_wide(c2, Uint32(MULTIPLIERS[1]))
            a, b = (key + Uint32(i * step & 0xFFFFFFFF) for key, step in zip((k0, k1), WEYL))
            c0, c1, c2, c3 = _upper(high) ^ c1 ^ a, Uint32(high), _upper(low) ^ c3 ^ b, Uint32(low)
        return c0, c1, c2, c3

    def words(self, row: Int32, column: Int32, count: int) -> list[Int32]:
        """Those of `count` keys of a row from `column` on, a multiple of 32."""
        return [self.word(row, column // KEYS + i) for i in range(-(-count // KEYS))]

    def by_quads(self, rows: list[Int32], column: Int32, count: int) -> list[list[Int32]]:
        """Of each row the words of `count` keys from `column` on, a multiple of 32, shifted so that bit i is that of
        this thread's first column + i. Four neighbouring threads have these rows; the first's first column is 0, the
        next's 2."""
        lane = cute.arch.lane_idx()
        thread, shift = lane % 4, lane % 4 * 2
        places = [(r, i) for r in range(len(rows)) for i in range(-(-count // KEYS))]
        found: list[list[Int32]] = [[] for _ in rows]
        for first in range(0, len(places), 4):
            four = places[first : first + 4]
            four += four[-1:] * (4 - len(four))
            row = _choose(thread, [rows[r] for r, _ in four])
            block = column // KEYS + _choose(thread, [Int32(i) for _, i in four])
            own = self.word(row, block)
            for i, (r, _) in enumerate(places[first : first + 4]):
                word = cute.arch.shuffle_sync(own, offset=(lane & ~3) + i)
                found[r].append(Int32(Uint32(word) >> Uint32(shift)))
        return found

    def by_keys(self, query: Int32, count: int, key: Int32) -> list[Int32]:
        """Of `count` queries from `query` on, a multiple of 32, the bits of one key for each thread of a warp: bit j of
        word i is that of query 32 * i + j. key: that of the warp's first thread, a multiple of 32."""
        lane = cute.arch.lane_idx()
        return [_transposed(self.word(query + (first + lane), key // KEYS)) for first in range(0, count, KEYS)]


def _upper(x: Uint64) -> Uint32:
    return Uint32(x >> Uint64(32))


def _choose(index: Int32, values: list[Int32]) -> Int32:
    """values[index]."""
    if all(value is values[0] for value in values):
        return values[0]
    chosen = values[-1]
    for i, value in reversed(list(enumerate(values[:-1]))):
        chosen = Int32(cutlass.select_(index == i, value, chosen))
    return chosen


def _transposed(word: Int32) -> Int32:
    """Of a warp's 32 x 32 bits, a word a thread, this thread's column: bit j is what thread j had as bit `lane`."""
    lane, x = cute.arch.lane_idx(), Uint32(word)
    # Hacker's Delight, 7-3: halves of ever smaller squares are exchanged, here between threads that far apart.
    for width, mask in ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        other = Uint32(cute.arch.shuffle_sync_bfly(Int32(x), offset=width, mask=-1, mask_and_clamp=31))
        upper = (x & Uint32(~mask & 0xFFFFFFFF)) | ((other >> Uint32(width)) & Uint32(mask))
        lower = (x & Uint32(mask)) | ((other << Uint32(width)) & Uint32(~mask & 0xFFFFFFFF))
        x = Uint32(cutlass.select_((lane & width) != 0, upper, lower))
    return Int32(x)


def keeps(words: list[Int32], i: int) -> Boolean:
    """Whether bit i of neighbouring words is set."""
    return is_unmasked(words[i // KEYS], i % KEYS)


def dropped(words: list[Int32], i: int, x: Float32) -> Float32:
    """x, or 0 where bit i says so."""
    return Float32(cutlass.select_(keeps(words, i), x, Float32(0.0)))
