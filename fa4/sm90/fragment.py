"""Which thread of a warpgroup has which element of a 64-row accumulator, and how its words get to shared memory.

A warp has 16 rows. Its thread t has the rows t / 4 and t / 4 + 8, and of every 8 columns the pair from 2 * (t % 4).
Element i of the registers is column i % 2 of the pair i / 4 of row i / 2 % 2 (PTX ISA, wgmma accumulator fragments).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..core.vec_io import pack_half
from ..pipeline.smem import PANEL_ROW_BYTES, Tile

ROWS_PER_THREAD = 2
ROWS_PER_WARP = 16
LANES_PER_ROW = 4


def row_in_warp(r: int) -> Int32:
    """The r-th row of this thread, of its warp's 16."""
    return cute.arch.lane_idx() // LANES_PER_ROW + 8 * r


def first_column() -> Int32:
    """The first column of this thread."""
    return cute.arch.lane_idx() % LANES_PER_ROW * 2


def own_columns(limit: Int32) -> Int32:
    """How many of this thread's columns of a row lie below column `limit`; none if it is negative."""
    within = limit - first_column()
    return cutlass.max((within >> 3) * 2 + cutlass.min(within & 7, 2), 0)


def row_elements(n: int, r: int) -> list[int]:
    """The register elements of row r of an accumulator of n columns, by column."""
    return [4 * pair + 2 * r + i for pair in range(n // 8) for i in range(2)]


def across_row(value: Float32, combine) -> Float32:
    """Over the four threads that share a row."""
    for offset in (2, 1):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=offset, mask=-1, mask_and_clamp=31))
    return value


def store_matrices(address, tile: Tile, words: list[Int32]) -> None:
    """Whole warp: write its 16 rows of an accumulator, rounded to 16 bits, to a panelled tile.

    words: one for each pair of columns and row, as `pack_pairs` gives them. address: where the warp's first row lies in
    shared memory, a multiple of 1024.
    """
    for i, place in enumerate(_places(address, tile, len(words))):
        four = words[4 * i : 4 * i + 4]
        registers = ", ".join(f"{{$r{i + 1}}}" for i in range(len(four)))
        cute.arch.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x{len(four)}.shared.b16 [{{$r0}}], {{ {registers} }};",
            read_only_args=[place, *four],
        )


def load_matrices(address, tile: Tile, count: int) -> list[Int32]:
    """Whole warp: read its 16 rows of a panelled tile, `count` words a thread, a multiple of 4, that lie as
    `store_matrices` would write them."""
    words: list[Int32] = []
    for place in _places(address, tile, count):
        words += cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[place],
        )
    return words


def _places(address, tile: Tile, count: int) -> list[Int32]:
    """For each four of a thread's `count` words, the row of a matrix that its lane names: row l % 8 of matrix l / 8,
    the matrices being (upper, lower) rows of one 8 columns, then of the next."""
    lane = cute.arch.lane_idx()
    row, right = lane % 8 + lane // 8 % 2 * 8, lane // 16
    own = Int32(address) + row * PANEL_ROW_BYTES + ((right ^ (row & 7)) << 4)
    split = [divmod(4 * i, tile.panel_columns) for i in range(0, count, 4)]
    return [(own ^ (column // 8 << 4)) + panel * tile.panel_bytes for panel, column in split]


def pack_pairs(accumulator: cute.Tensor, factors: list[Float32], dtype: type[cutlass.Numeric]) -> list[Int32]:
    """The elements of an accumulator times their row's factor, rounded to `dtype`, two to a word."""
    pairs = range(0, cute.size(accumulator), 2)
    return [
        pack_half(accumulator[i] * factors[i // 2 % 2], accumulator[i + 1] * factors[i // 2 % 2], dtype) for i in pairs
    ]
