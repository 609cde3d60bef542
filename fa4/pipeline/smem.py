"""Shared memory: regions laid out from a table, and the one tile format all operands use.

A tile of rows x columns is stored as panels: 128 bytes of every row (64 columns of 16 bits), one panel after another,
128-byte swizzled. One TMA box fills a panel. The matrix unit reads the same bytes K-major (the columns are the
reduction: Q, K) or MN-major (the rows are: V), so every operand and the output share this format.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..core.constant import Constant
from ..core.vec_io import store_vec

PANEL_ROW_BYTES = 128
SWIZZLE_ALIGN = 1024  # bytes after which the 128-byte swizzle repeats


@dataclass(frozen=True, slots=True)
class Tile(Constant):
    """A panelled tile; `columns` is rounded up to whole panels in storage (TMA fills the rest with zeros).

    slots: of a tensor whose rows are (head, row), the tile's rows that the heads of a row take; TMA fills those that
    are no head's with zeros. 1 where there are as many heads, or no such pairs. pieces: equal shares of the rows that
    come by a copy each, from places that may be apart.
    """

    rows: int
    columns: int
    bits: int = 16  # of an element
    slots: int = 1
    pieces: int = 1

    @property
    def piece_rows(self) -> int:
        return self.rows // self.pieces

    @property
    def panel_columns(self) -> int:
        return 8 * PANEL_ROW_BYTES // self.bits

    @property
    def panels(self) -> int:
        return -(-self.columns // self.panel_columns)

    @property
    def panel_bytes(self) -> int:
        return self.rows * PANEL_ROW_BYTES

    @property
    def nbytes(self) -> int:
        return self.panels * self.panel_bytes

    def panel_layout(self) -> cute.ComposedLayout:
        """(rows, panel_columns) -> element offset within one panel, as TMA atoms want it."""
        outer = cute.make_layout((self.rows, self.panel_columns), stride=(self.panel_columns, 1))
        return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, outer)


@dataclass(frozen=True, slots=True)
class Region:
    """`nbytes` bytes named `name`, aligned to `align`; `over` puts it at the start of an earlier region instead."""

    name: str
    nbytes: int
    align: int = 16
    over: str | None = None


class SmemMap(Constant):
    """Offsets of the regions in dynamic shared memory, in table order.

    Raises:
        ValueError: two regions share a name, or one does not fit into the region it lies over.
    """

    def __init__(self, *regions: Region):
        self.offsets: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        end = 0
        for region in regions:
            if region.name in self.offsets:
                raise ValueError(f"two smem regions are named {region.name}")
            if region.over is not None:
                if region.nbytes > self.sizes.get(region.over, 0):
                    raise ValueError(f"smem region {region.name} does not fit over {region.over}")
                self.offsets[region.name] = self.offsets[region.over]
            else:
                start = -(-end // region.align) * region.align
                self.offsets[region.name], end = start, start + region.nbytes
            self.sizes[region.name] = region.nbytes
        self.nbytes = end

    @property
    def regions(self) -> dict[str, tuple[int, int]]:
        """Name -> (first byte, end)."""
        return {name: (first, first + self.sizes[name]) for name, first in self.offsets.items()}

    def pointer(self, name: str, dtype) -> cute.Pointer:
        """The region's first byte, as a shared-memory pointer to `dtype`."""
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=SWIZZLE_ALIGN)
        return cute.recast_ptr(base + self.offsets[name], dtype=dtype)

    def address(self, name: str) -> Int32:
        """The region's first byte, as a 32-bit shared-memory address."""
        return self.pointer(name, cutlass.Int8).toint()


def store_row_chunk(
    tile_address, tile: Tile, row, column: int, words: list[Int32], space=cute.AddressSpace.smem
) -> None:
    """Write 16 bytes (4 words) at (row, column) of a panelled tile; `column` is a multiple of as many elements. `space`
    may be distributed shared memory, `tile_address` being another CTA's."""
    panel, within = divmod(column, tile.panel_columns)
    chunk = within * tile.bits // 128 ^ (row & 7)
    address = tile_address + panel * tile.panel_bytes + row * PANEL_ROW_BYTES + chunk * 16
    store_vec(cute.make_ptr(Int32, address, space, assumed_align=16), words)


def store_row(tile_address, tile: Tile, row, column: int, words: list[Int32], space=cute.AddressSpace.smem) -> None:
    """Write whole chunks of 16 bytes of a row of a panelled tile, from `column`, which is a multiple of a chunk."""
    for i in range(0, len(words), 4):
        store_row_chunk(tile_address, tile, row, column + 32 // tile.bits * i, words[i : i + 4], space)
