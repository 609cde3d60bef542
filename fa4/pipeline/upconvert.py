"""Conversion of tiles of 8 or 4 bits to the 16-bit tiles in shared memory that the matrix unit reads."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..core.constant import Constant
from ..core.stored import Stored
from ..core.vec_io import load_vec, store_vec
from .cursor import Cursor
from .roles import WARPS_PER_WARPGROUP
from .smem import PANEL_ROW_BYTES, Tile

ROWS = 8  # of a tile that a warp converts at a time; also the period of the swizzle
COLUMNS = 64  # likewise: one panel of 16-bit values, half a panel of 8-bit values
_CHUNK_BYTES = 16  # per store of a thread, and per load of 8-bit values
CHUNK = 16  # columns that a thread converts at a time


@dataclass(frozen=True)
class Upconversion(Constant):
    """A warpgroup's conversion into a ring of 16-bit tiles.

    first: address of the ring's first stage. step: bytes between stages. tile: of a multiple of 32 rows.
    """

    first: Int32
    step: cutlass.Constexpr[int]
    tile: cutlass.Constexpr[Tile]
    stored: Stored

    def move(self, ring: ByteRing, raw: Cursor, wide: Cursor) -> tuple[Cursor, Cursor]:
        """Whole warpgroup: wait for an 8-bit tile, load and release it, and store its 16-bit tile."""
        raw.wait()
        loaded = ring.load(self, raw.stage)
        raw.arrive()
        return raw.next(), self.put(wide, loaded)

    def put(self, wide: Cursor, loaded: list[list[Int32]]) -> Cursor:
        """Whole warpgroup: convert and store a tile whose `shares` each thread has loaded, and arrive."""
        wide.wait()
        self._store(self.first + wide.stage * self.step, loaded)
        wide.arrive()
        return wide.next()

    @property
    def shares(self) -> list[tuple[int, int]]:
        """(row group, 16-bit panel) of each 16 columns that a thread converts: in `row(group)`, starting at column
        `panel * COLUMNS + column()`."""
        return [(group, panel) for group in range(self.groups) for panel in range(self.tile.panels)]

    @property
    def groups(self) -> int:
        return self.tile.rows // (ROWS * WARPS_PER_WARPGROUP)

    def row(self, group: int) -> Int32:
        """This thread's tile row in a row group."""
        return self.first_row(group) + self.row_in_group()

    def column(self) -> Int32:
        """This thread's first column in half an 8-bit panel."""
        return self.chunk() * CHUNK

    def chunk(self) -> Int32:
        return cute.arch.lane_idx() % 4

    def row_in_group(self) -> Int32:
        """This thread's row in a row group. Eight threads access memory together: four chunks of each of two rows. The
        two row numbers differ in bits 0 and 2, which avoids bank conflicts: for chunks 0 to 3 of the loads, and for the
        even or odd chunks of the stores."""
        lane = cute.arch.lane_idx()
        return lane // 8 ^ (lane // 4 % 2 * 5)

    def first_row(self, group: int) -> Int32:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        return (group * WARPS_PER_WARPGROUP + warp) * ROWS

    def _store(self, tile_address: Int32, loaded: list[list[Int32]]) -> None:
        bases = self.store_bases(tile_address)
        for share, packed in zip(self.shares, loaded):
            self.store(bases, share, packed)
            if self.stored.has_scales:  # else the compiler converts several shares at once, and spills
                cute.arch.sync_warp()

    def store_bases(self, tile_address: Int32) -> list[Int32]:
        """Return what `store` takes for the tile at `tile_address`: the addresses of this thread's first two chunks."""
        row = self.row_in_group()
        first = tile_address + self.row(0) * PANEL_ROW_BYTES + (2 * self.chunk() ^ row) * _CHUNK_BYTES
        return [first, first ^ _CHUNK_BYTES]

    def store(self, bases: list[Int32], share: tuple[int, int], packed: list[Int32]) -> None:
        """Convert and store one of the `shares`, as `Stored.load` returned it."""
        self.store_wide(bases, share, self.stored.operands(packed))

    def store_wide(self, bases: list[Int32], share: tuple[int, int], wide: list[Int32]) -> None:
        """Store one of the `shares`, 8 words of 16-bit values."""
        for half, base in enumerate(bases):
            store_vec(_smem_ptr(base + self.offset(share)), wide[4 * half : 4 * half + 4])

    def offset(self, share: tuple[int, int]) -> int:
        """Bytes from `store_bases` to one of the `shares`."""
        group, panel = share
        return group * WARPS_PER_WARPGROUP * ROWS * PANEL_ROW_BYTES + panel * self.tile.panel_bytes


@dataclass(frozen=True)
class ByteRing(Constant):
    """A ring of 8-bit tiles in shared memory, with rows, columns and fields as in `Upconversion`."""

    first: Int32
    step: cutlass.Constexpr[int]
    tile: cutlass.Constexpr[Tile]

    def load(self, upconversion: Upconversion, stage: Int32) -> list[list[Int32]]:
        """Load a thread's shares of a stage: 4 packed words each."""
        row = upconversion.row_in_group()
        base = self.first + stage * self.step + row * PANEL_ROW_BYTES + (upconversion.chunk() ^ row) * _CHUNK_BYTES
        loaded = []
        for group, panel in upconversion.shares:
            address = base + upconversion.first_row(group) * PANEL_ROW_BYTES + panel // 2 * self.tile.panel_bytes
            loaded.append(load_vec(_smem_ptr(address ^ (panel % 2 * COLUMNS)), 4))
        return loaded


def _smem_ptr(address: Int32) -> cute.Pointer:
    return cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=_CHUNK_BYTES)
