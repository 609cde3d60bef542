"""Dropout on the accumulators of mma.sync, whose rows are spread over four threads, or over warps too."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..core.dropout import Dropout, dropped


def drop(dropout: Dropout, weights: list[list[Float32]], rows: list[Int32], key: Int32) -> list[list[Float32]]:
    """P of a warp that has whole rows, from `key` on, 0 where it is dropped."""
    words = dropout.by_quads(rows, key, 4 * len(weights[0]))
    return [[dropped(words[r], i // 2 * 8 + i % 2, x) for i, x in enumerate(line)] for r, line in enumerate(weights)]


@cute.jit
def share_words(work, memory, m_block):
    """Put the words of a tile of query rows where all threads find them; each thread its share."""
    cfg, m = work.cfg, work.cfg.tiles.tile_m
    count = cfg.tiles.words_per_row
    for i in cutlass.range_constexpr(-(-m * count // cfg.threads)):
        place = i * cfg.threads + work.thread
        if place < m * count:
            row, block = m_block * m + place % m, work.n_block * count + place // m
            memory.words[place % m, place // m] = work.dropout.word(row, block)


def factors(work, memory, own: cute.Tensor, first: cute.Tensor) -> list[list[Float32]]:
    """What P and dP of a thread's elements are multiplied by: 1 / (1 - p), or 0 where dropped. own, first: as
    `tensor_core.places_of` has them."""
    offsets = [first[0, c][1] - first[0, 0][1] for c in range(cute.size(own, mode=[1]))]
    begin, lines = Uint32(own[0, 0][1]), []  # the bits of 2 neighbours of every 8 or more: none leaves its word
    for r in range(cute.size(own, mode=[0])):
        words = [memory.words[own[r, 0][0], i] for i in range(work.cfg.tiles.words_per_row)]
        words = [Int32(Uint32(word) >> begin) for word in words]
        lines.append([dropped(words, offset, work.dropout.scale) for offset in offsets])
    return lines
