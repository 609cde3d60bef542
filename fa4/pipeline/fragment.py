"""Fragment layout of an accumulator of wgmma or mma.sync, and its transfer to and from shared memory.

A warp holds 16 rows. Thread t holds rows t / 4 and t / 4 + 8, and of every 8 columns the pair from 2 (t % 4) on.
Register element i is column i % 2 of column pair i / 4 in row i / 2 % 2 (PTX ISA, accumulator fragments of wgmma and of
mma.m16n8).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..core.vec_io import pack_half
from .smem import PANEL_ROW_BYTES, Tile

ROWS_PER_THREAD = 2
LANES_PER_ROW = 4


def row_in_warp(r: int) -> Int32:
    """Return the row of this thread's r-th row within its warp's 16 rows."""
    return cute.arch.lane_idx() // LANES_PER_ROW + 8 * r


def first_column() -> Int32:
    """Return the first column of this thread."""
    return cute.arch.lane_idx() % LANES_PER_ROW * 2


def columns_below(limit: Int32) -> Int32:
    """Return how many of this thread's columns of a row are less than `limit`; 0 if `limit` is negative."""
    within = limit - first_column()
    return cutlass.max((within >> 3) * 2 + cutlass.min(within & 7, 2), 0)


def row_registers(n: int, r: int) -> list[int]:
    """Return the register indices of row r of an accumulator with n columns, in column order."""
    return [4 * pair + 2 * r + i for pair in range(n // 8) for i in range(2)]


def store_matrices(address: Int32, tile: Tile, packed: list[Int32]) -> None:
    """Whole warp: store its 16 rows of an accumulator, rounded to 16 bits, to a panelled tile.

    address: shared-memory address of the warp's first row, a multiple of 1024. packed: one 32-bit register for each
    column pair and row, from `pack_pairs`.
    """
    for i, row_address in enumerate(_matrix_row_addresses(address, tile, len(packed))):
        quad = packed[4 * i : 4 * i + 4]
        registers = ", ".join(f"{{$r{i + 1}}}" for i in range(len(quad)))
        cute.arch.inline_ptx(
            f"stmatrix.sync.aligned.m8n8.x{len(quad)}.shared.b16 [{{$r0}}], {{ {registers} }};",
            read_only_args=[row_address, *quad],
        )


def load_matrices(address: Int32, tile: Tile, count: int) -> list[Int32]:
    """Whole warp: load its 16 rows of a panelled tile in the layout of `store_matrices`, which is that of operand A of
    mma.sync. count: registers per thread, a multiple of 4; four registers of each thread hold 32 bytes of all rows."""
    packed: list[Int32] = []
    for row_address in _matrix_row_addresses(address, tile, count):
        packed += cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[row_address],
        )
    return packed


def _matrix_row_addresses(address: Int32, tile: Tile, count: int) -> list[Int32]:
    """Return, for each four of a thread's `count` registers, the address of the matrix row that its lane names: row l %
    8 of matrix l / 8 for lane l. Matrices are (upper, lower) rows of 8 columns, then of the next 8."""
    lane = cute.arch.lane_idx()
    row, right = lane % 8 + lane // 8 % 2 * 8, lane // 16
    own = Int32(address) + row * PANEL_ROW_BYTES + ((right ^ (row & 7)) << 4)
    split = [divmod(8 * i, PANEL_ROW_BYTES) for i in range(0, count, 4)]
    return [(own ^ byte) + panel * tile.panel_bytes for panel, byte in split]


def pack_pairs(accumulator: cute.Tensor, factors: list[Float32], dtype: type[cutlass.Numeric]) -> list[Int32]:
    """Multiply each accumulator element by its row's factor, round it to `dtype`, and pack two per 32-bit register."""
    pairs = range(0, cute.size(accumulator), 2)
    return [
        pack_half(accumulator[i] * factors[i // 2 % 2], accumulator[i + 1] * factors[i // 2 % 2], dtype) for i in pairs
    ]
