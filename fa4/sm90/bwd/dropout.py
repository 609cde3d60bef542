"""Dropout on transposed scores: a warp has 16 keys; a thread has two of them, and the same two of every 8 queries."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ...core.constant import Constant
from ...core.dropout import Dropout, apply_dropout, keeps
from ...mods.ir.dropout import KEYS
from ..fragment import LANES_PER_ROW, first_column, row_in_warp

PAIR = 2 * KEYS  # queries: the bits of 16 keys for two queries fill a word


@dataclass(frozen=True)
class KeepBits(Constant):
    """Keep bits of a thread's elements of a step: one word per query q of the thread among the first 32 of every 64.
    Bits 0 and 8 are its two keys with query q, bits 16 and 24 its keys with query q + 32."""

    packed: list[Int32]
    scale: Float32

    @staticmethod
    def of(dropout: Dropout, query: Int32, count: int, key: Int32) -> KeepBits:
        """Return the keep bits of `count` queries from `query` on, a multiple of 64. key: this thread's first key.

        Each thread computes the words of the query with its lane number in every 32, and gets the words of its own
        queries by shuffles.
        """
        lane, block = cute.arch.lane_idx(), key // KEYS
        upper = Uint32(key - row_in_warp(0)) % KEYS  # 16 if the warp has the second half of the block's keys
        packed = []
        for first in range(0, count, PAIR):
            low, high = (Uint32(dropout.word(query + (first + i * KEYS + lane), block)) for i in range(2))
            both = ((low >> upper) & Uint32(0xFFFF)) | ((high >> upper) << Uint32(16))
            for column in range(0, KEYS, 8):
                for i in range(2):
                    word = cute.arch.shuffle_sync(Int32(both), offset=first_column() + (column + i))
                    packed.append(Int32(Uint32(word) >> Uint32(lane // LANES_PER_ROW)))
        return KeepBits(packed, dropout.scale)

    def factor(self, i: int) -> Float32:
        """Return the factor of P and dP at accumulator element i: 1 / (1 - p), or 0 if dropped."""
        return apply_dropout(*self._bit(i), self.scale)

    def only(self, p: list[Float32]) -> list[Float32]:
        """Return the elements, with 0 for dropped ones."""
        return [apply_dropout(*self._bit(i), x) for i, x in enumerate(p)]

    def by_sign(self, p: list[Float32]) -> list[Float32]:
        """Return the elements, which are not negative, with a minus sign for dropped ones."""
        return [Float32(cutlass.select_(keeps(*self._bit(i)), x, -x)) for i, x in enumerate(p)]

    def _bit(self, i: int) -> tuple[list[Int32], int]:
        """Return the word of accumulator element i and the position of its bit."""
        group, of_pair = divmod(i // 4, PAIR // 8)  # octets of queries
        group = group * (KEYS // 8) + of_pair % (KEYS // 8)
        return [self.packed[2 * group + i % 2]], 16 * (of_pair // (KEYS // 8)) + 8 * (i // 2 % 2)
