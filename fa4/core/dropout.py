"""Keep bits of dropout in device code, as defined in `mods.ir.dropout`: one word per query row and 32 keys.

A word costs two Philox calls and eight instructions. Threads whose elements share words share the work:

- One thread per row: it computes its row's words (`words`).
- Four threads per row, each with two of every 8 columns: each computes every fourth word and reads the other words by
  shuffles (`by_quads`).
- A warp with one key per thread: each thread computes the word of one of 32 queries; the warp transposes the bits
  (`by_keys`).
- A row's columns in several warps: the words go through shared memory (`sm80.backward_tile`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64

from ..mods.ir.dropout import BITS, KEYS, MULTIPLIERS, ROUNDS, WEYL
from ..mods.ir.record import ModSpec
from ..runtime import jit
from .constant import Constant
from .mask_bits import is_unmasked

if TYPE_CHECKING:
    from .traced import ModTensors


class DropoutTensors(NamedTuple):
    """Run-time values of a call's dropout, from `mods.ir.tensors.kernel_mods`. seed: (2,) int64, seed and offset. bits,
    scale: see `mods.ir.dropout.Rate`. heads: query heads."""

    seed: cute.Tensor
    bits: tuple
    scale: Float32
    heads: Int32

    @staticmethod
    def fake() -> DropoutTensors:
        """Return fake arguments for compilation."""
        return DropoutTensors(jit.fake_tensor(Int64, 1, align=8), (Int32(0),) * BITS, Float32(0.0), Int32(0))


@dataclass(frozen=True)
class Dropout(Constant):
    """Dropout of a tile's sequence. Rows are as in `core.traced.Traced`: row i is query i // rows_per_query of packed
    head `head` + i % rows_per_query."""

    tensors: DropoutTensors
    key: tuple[Uint32, Uint32]
    offset: Uint32
    pair: Int32  # index of the (sequence, first head) pair
    packed: int
    rows_per_query: int

    @staticmethod
    def of(
        mods: ModSpec | None,
        kernel_mods: ModTensors | None,
        batch: Int32,
        head: Int32,
        packed: int = 1,
        rows: int | None = None,
    ) -> Dropout | None:
        """Return a call's dropout, or None. rows: rows per query, if more than `packed`."""
        if mods is None or not mods.dropout:
            return None
        tensors = kernel_mods.dropout
        seed, offset = Int64(tensors.seed[0]), Int64(tensors.seed[1])
        key = Uint32(seed), Uint32(seed >> 32)
        return Dropout(tensors, key, Uint32(offset), batch * tensors.heads + head, packed, rows or packed)

    @property
    def scale(self) -> Float32:
        """Factor of the kept elements."""
        return self.tensors.scale

    def word(self, row: Int32, block: Int32) -> Int32:
        """Return a word whose bit j is set if the row keeps key 32 * block + j."""
        query, pair = row, self.pair
        if self.rows_per_query > 1:
            query, head = row // self.rows_per_query, row % self.rows_per_query
            # padding rows beyond the packed heads get unused bits
            pair = pair + head
        keep = Int32(0)
        words = [x for half in (0, 1) for x in self._philox(Uint32(2 * block + half), Uint32(query), Uint32(pair))]
        for word, bit in zip(reversed(words), self.tensors.bits):
            # Compare bit by bit: equal bits keep the result of the lower bits. One lop3 for 32 keys.
            not_word = ~Int32(word)
            keep = (keep & not_word) | (bit & (keep | not_word))
        return keep

    def _philox(self, c0: Uint32, c1: Uint32, c2: Uint32) -> tuple:
        c3, (k0, k1) = self.offset, self.key
        for i in range(ROUNDS):
            low, high = cute.arch.mul_wide(c0, Uint32(MULTIPLIERS[0])), cute.arch.mul_wide(c2, Uint32(MULTIPLIERS[1]))
            a, b = (key + Uint32(i * step & 0xFFFFFFFF) for key, step in zip((k0, k1), WEYL))
            c0, c1, c2, c3 = _upper(high) ^ c1 ^ a, Uint32(high), _upper(low) ^ c3 ^ b, Uint32(low)
        return c0, c1, c2, c3

    def words(self, row: Int32, column: Int32, count: int) -> list[Int32]:
        """Return the words of `count` keys of a row, starting at `column`, a multiple of 32."""
        return [self.word(row, column // KEYS + i) for i in range(-(-count // KEYS))]

    def by_quads(self, rows: list[Int32], column: Int32, count: int) -> list[list[Int32]]:
        """Return, per row, the words of `count` keys starting at `column` (a multiple of 32), shifted so that bit i
        belongs to this thread's first column + i. Four neighbouring threads share the rows; their first columns are 0,
        2, 4 and 6."""
        lane = cute.arch.lane_idx()
        thread, shift = lane % 4, lane % 4 * 2
        slots = [(r, i) for r in range(len(rows)) for i in range(-(-count // KEYS))]
        result: list[list[Int32]] = [[] for _ in rows]
        for first in range(0, len(slots), 4):
            quad = slots[first : first + 4]
            quad += quad[-1:] * (4 - len(quad))
            row = _choose(thread, [rows[r] for r, _ in quad])
            block = column // KEYS + _choose(thread, [Int32(i) for _, i in quad])
            own = self.word(row, block)
            for i, (r, _) in enumerate(slots[first : first + 4]):
                word = cute.arch.shuffle_sync(own, offset=(lane & ~3) + i)
                result[r].append(Int32(Uint32(word) >> Uint32(shift)))
        return result

    def by_keys(self, query: Int32, count: int, key: Int32) -> list[Int32]:
        """Return the bits of this thread's key for `count` queries (a multiple of 32) starting at `query`: bit j of
        word i belongs to query `query` + 32 * i + j. key: key of the warp's first thread, a multiple of 32."""
        lane = cute.arch.lane_idx()
        return [_transposed(self.word(query + (first + lane), key // KEYS)) for first in range(0, count, KEYS)]


def _upper(x: Uint64) -> Uint32:
    return Uint32(x >> Uint64(32))


def _choose(index: Int32, values: list[Int32]) -> Int32:
    """Return values[index]."""
    if all(value is values[0] for value in values):
        return values[0]
    chosen = values[-1]
    for i, value in reversed(list(enumerate(values[:-1]))):
        chosen = Int32(cutlass.select_(index == i, value, chosen))
    return chosen


def _transposed(word: Int32) -> Int32:
    """Transpose a warp's 32 x 32 bits, one word per thread: bit j of the result is bit `lane` of thread j."""
    lane, x = cute.arch.lane_idx(), Uint32(word)
    # Hacker's Delight, 7-3: exchange halves of ever smaller squares, here between threads `width` lanes apart.
    for width, mask in ((16, 0x0000FFFF), (8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        other = Uint32(cute.arch.shuffle_sync_bfly(Int32(x), offset=width, mask=-1, mask_and_clamp=31))
        upper = (x & Uint32(~mask & 0xFFFFFFFF)) | ((other >> Uint32(width)) & Uint32(mask))
        lower = (x & Uint32(mask)) | ((other << Uint32(width)) & Uint32(~mask & 0xFFFFFFFF))
        x = Uint32(cutlass.select_((lane & width) != 0, upper, lower))
    return Int32(x)


def keeps(words: list[Int32], i: int) -> Boolean:
    """Whether bit i of consecutive words is set."""
    return is_unmasked(words[i // KEYS], i % KEYS)


def apply_dropout(words: list[Int32], i: int, x: Float32) -> Float32:
    """Return x if bit i is set, else 0."""
    return Float32(cutlass.select_(keeps(words, i), x, Float32(0.0)))
