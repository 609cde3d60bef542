"""Shared memory: regions allocated from a table, and the tile format of all operands.

A tile of rows x columns is a sequence of panels. A panel holds 128 bytes of every row (64 columns of 16 bits), 128-byte
swizzled. One TMA box fills one panel. The matrix unit reads a tile K-major (reduction over columns: Q, K) or MN-major
(reduction over rows: V), so all operands and the output share this format. Operands of mma.sync may have rows of 64 or
32 bytes, with the swizzle of that name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.constant import Constant
from ..runtime.dsl import cute, cutlass

if TYPE_CHECKING:
    from cutlass import Int32

PANEL_ROW_BYTES = 128
SWIZZLE_ALIGN = 1024  # bytes after which the 128-byte swizzle repeats


@dataclass(frozen=True, slots=True)
class Tile(Constant):
    """A tile in panels. `columns` is rounded up to whole panels in storage; TMA fills the rest with zeros.

    slots: tile rows per row of a tensor whose rows are (head, row) pairs; TMA fills slots without a head with zeros. 1
    if there are as many slots as heads, or no such pairs. pieces: equal parts of the rows, each loaded by its own copy
    from its own global address. row_bytes: of a panel, 128, 64 or 32.
    """

    rows: int
    columns: int
    bits: int = 16  # per element
    slots: int = 1
    pieces: int = 1
    row_bytes: int = PANEL_ROW_BYTES

    @property
    def piece_rows(self) -> int:
        return self.rows // self.pieces

    @property
    def panel_columns(self) -> int:
        return 8 * self.row_bytes // self.bits

    @property
    def panels(self) -> int:
        return -(-self.columns // self.panel_columns)

    @property
    def panel_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def nbytes(self) -> int:
        return self.panels * self.panel_bytes

    def panel_layout(self) -> cute.ComposedLayout:
        """(rows, panel_columns) -> element offset within one panel, as TMA atoms need it."""
        outer = cute.make_layout((self.rows, self.panel_columns), stride=(self.panel_columns, 1))
        return cute.make_composed_layout(self.swizzle(), 0, outer)

    def swizzle(self) -> cute.Swizzle:
        """Permutation of the 16-byte chunks of a row, see `swizzled`."""
        return cute.make_swizzle((self.row_bytes // 16).bit_length() - 1, 4, 3)

    def swizzled(self, row: Int32) -> Int32:
        """Number that is combined with a chunk's index within a row by exclusive or."""
        return row * self.row_bytes // PANEL_ROW_BYTES % (self.row_bytes // 16)


@dataclass(frozen=True, slots=True)
class Region:
    """`nbytes` bytes of shared memory, aligned to `align`. over: name of an earlier region whose start it shares."""

    name: str
    nbytes: int
    align: int = 16
    over: str | None = None


class SmemMap(Constant):
    """Offsets of the regions in dynamic shared memory, in table order.

    Raises:
        ValueError: two regions share a name, or a region is larger than the one named by `over`.
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
        """Region name -> (first byte, end)."""
        return {name: (first, first + self.sizes[name]) for name, first in self.offsets.items()}

    def pointer(self, name: str, dtype) -> cute.Pointer:
        """Shared-memory pointer to the region's first byte, of element type `dtype`."""
        base = cute.arch.get_dyn_smem(cutlass.Int8, alignment=SWIZZLE_ALIGN)
        return cute.recast_ptr(base + self.offsets[name], dtype=dtype)

    def address(self, name: str) -> Int32:
        """32-bit shared-memory address of the region's first byte."""
        return self.pointer(name, cutlass.Int8).toint()
