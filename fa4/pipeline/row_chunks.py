"""Stores of parts of a tile's row to shared memory, in chunks of 16 bytes."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from ..core.vec_io import store_vec
from .smem import PANEL_ROW_BYTES, Tile


def store_row_chunk(
    tile_address, tile: Tile, row, column: int, packed: list[Int32], space=cute.AddressSpace.smem
) -> None:
    """Store 16 bytes (4 packed words) at (row, column) of a tile; `column` is a multiple of the elements in 16 bytes.
    space: distributed shared memory if `tile_address` is in another CTA."""
    panel, panel_column = divmod(column, tile.panel_columns)
    chunk = panel_column * tile.bits // 128 ^ (row & 7)
    address = tile_address + panel * tile.panel_bytes + row * PANEL_ROW_BYTES + chunk * 16
    store_vec(cute.make_ptr(Int32, address, space, assumed_align=16), packed)


def store_row(tile_address, tile: Tile, row, column: int, packed: list[Int32], space=cute.AddressSpace.smem) -> None:
    """Store whole 16-byte chunks of a tile's row, starting at `column`, a multiple of a chunk's elements."""
    for i in range(0, len(packed), 4):
        store_row_chunk(tile_address, tile, row, column + 32 // tile.bits * i, packed[i : i + 4], space)
