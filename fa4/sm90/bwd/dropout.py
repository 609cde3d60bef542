"""Dropout on transposed scores: a warp has 16 keys, a thread two of them, with the same two of every 8 queries."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ...core.constant import Constant
from ...core.dropout import Dropout, dropped, keeps
from ...mods.dropout import KEYS
from ..fragment import LANES_PER_ROW, first_column, row_in_warp

PAIR = 2 * KEYS  # queries: the bits of 16 keys of two queries fill a word


@dataclass(frozen=True)
class Kept(Constant):
    """The keep bits of a thread's elements of a step. Of each of its queries q among the first 32 of every 64 a word:
    bits 0 and 8 are those of its two keys with q, bits 16 and 24 those with query q + 32."""

    words: list[Int32]
    scale: Float32

    @staticmethod
    def of(dropout: Dropout, query: Int32, count: int, key: Int32) -> Kept:
        """Of `count` queries from `query` on, a multiple of 64. key: this thread's first.

        Each thread computes the words of its number's query in every 32, and reads its own queries' from the others.
        """
        lane, block = cute.arch.lane_idx(), key // KEYS
        upper = Uint32(key - row_in_warp(0)) % KEYS  # 16 if the warp's keys are the block's second half
        words = []
        for first in range(0, count, PAIR):
            low, high = (Uint32(dropout.word(query + (first + i * KEYS + lane), block)) for i in range(2))
            both = ((low >> upper) & Uint32(0xFFFF)) | ((high >> upper) << Uint32(16))
            for column in range(0, KEYS, 8):
                for i in range(2):
                    word = cute.arch.shuffle_sync(Int32(both), offset=first_column() + (column + i))
                    words.append(Int32(Uint32(word) >> Uint32(lane // LANES_PER_ROW)))
        return Kept(words, dropout.scale)

    def factor(self, i: int) -> Float32:
        """What P and dP of element i of an accumulator are multiplied by: 1 / (1 - p), or 0 where dropped."""
        return dropped(*self._bit(i), self.scale)

    def only(self, p: list[Float32]) -> list[Float32]:
        """The elements, 0 where they are dropped."""
        return [dropped(*self._bit(i), x) for i, x in enumerate(p)]

    def by_sign(self, p: list[Float32]) -> list[Float32]:
        """The elements, none of them negative, with a minus where they are dropped."""
        return [Float32(cutlass.select_(keeps(*self._bit(i)), x, -x)) for i, x in enumerate(p)]

    def _bit(self, i: int) -> tuple[list[Int32], int]:
        """The word of element i of an accumulator, and its bit there."""
        group, of_pair = divmod(i // 4, PAIR // 8)  # of the query's 8
        group = group * (KEYS // 8) + of_pair % (KEYS // 8)
        return [self.words[2 * group + i % 2]], 16 * (of_pair // (KEYS // 8)) + 8 * (i // 2 % 2)
