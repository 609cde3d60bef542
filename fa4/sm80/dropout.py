"""Dropout on mma.sync fragments: a row is spread over four threads, in the backward also over warps."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from ..core.dropout import Dropout, apply_dropout
from ..mods.ir.dropout import KEYS
from .backward_work import SharedMemory, Sm80BackwardWork


def drop(dropout: Dropout, p: list[list[Float32]], rows: list[Int32], key: Int32) -> list[list[Float32]]:
    """Return P with dropped elements set to 0, for warps that hold whole rows. key: first key of the fragment."""
    keep_bits = dropout.by_quads(rows, key, 4 * len(p[0]))
    return [[apply_dropout(keep_bits[r], i // 2 * 8 + i % 2, x) for i, x in enumerate(row)] for r, row in enumerate(p)]


@cute.jit
def share_keep_bits(work: Sm80BackwardWork, memory: SharedMemory, m_block: Int32):
    """Compute the keep bits of a tile of query rows into shared memory; each thread computes a share."""
    cfg, m = work.cfg, work.cfg.tiles.tile_m
    count = cfg.tiles.keep_words_per_row
    for i in cutlass.range_constexpr(-(-m * count // cfg.threads)):
        slot = i * cfg.threads + work.thread
        if slot < m * count:
            row, block = m_block * m + slot % m, work.n_block * cfg.tiles.tile_n // KEYS + slot // m
            memory.keep_bits[slot % m, slot // m] = work.dropout.word(row, block)


def dropout_factors(
    work: Sm80BackwardWork, memory: SharedMemory, coords: cute.Tensor, coords0: cute.Tensor
) -> list[list[Float32]]:
    """Factors of P and dP for a thread's elements: 1 / (1 - p), or 0 if dropped. coords, coords0: see
    `tensor_core.mma_coords`."""
    offsets = [coords0[0, c][1] - coords0[0, 0][1] for c in range(cute.size(coords, mode=[1]))]
    first_bit, rows = Uint32(coords[0, 0][1]), []  # two neighbours of every 8 columns: no bit leaves its word
    tile_n = work.cfg.tiles.tile_n
    if tile_n < KEYS:  # a word has the bits of several tiles
        first_bit += Uint32(work.n_block * tile_n % KEYS)
    for r in range(cute.size(coords, mode=[0])):
        keep_bits = [memory.keep_bits[coords[r, 0][0], i] for i in range(work.cfg.tiles.keep_words_per_row)]
        keep_bits = [Int32(Uint32(word) >> first_bit) for word in keep_bits]
        rows.append([apply_dropout(keep_bits, offset, work.dropout.scale) for offset in offsets])
    return rows
