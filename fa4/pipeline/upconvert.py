"""Tiles of 8-bit numbers, as the tiles of 16-bit numbers in shared memory that products read."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from ..core.bytes import upconverted
from ..core.constant import Constant
from ..core.vec_io import load_vec, store_vec
from .cursor import Cursor
from .roles import WARPS_PER_WARPGROUP
from .smem import PANEL_ROW_BYTES, Tile

ROWS = 8  # of a tile that a warp takes at a time, and after which the swizzle repeats
COLUMNS = 64  # likewise: a panel of 16-bit numbers, half a panel of bytes
_CHUNK = 16  # bytes that a thread loads at a time


@dataclass(frozen=True)
class Upconversion(Constant):
    """A warpgroup's share of a ring of tiles that bytes are converted into.

    first: address of the ring's first stage; stages lie `step` bytes apart. The tile has a multiple of 32 rows. source,
    dtype: of the bytes, and of what becomes of them.
    """

    first: Int32
    step: cutlass.Constexpr[int]
    tile: cutlass.Constexpr[Tile]
    source: cutlass.Constexpr[torch.dtype]
    dtype: cutlass.Constexpr[type[cutlass.Numeric]]

    def move(self, ring: ByteRing, raw: Cursor, wide: Cursor) -> tuple[Cursor, Cursor]:
        """Whole warpgroup: wait for a tile of bytes, let go of it, and hand its numbers on."""
        raw.wait()
        loaded = ring.load(self, raw.stage)
        raw.arrive()
        return raw.next(), self.put(wide, loaded)

    def put(self, wide: Cursor, loaded: list[list[Int32]]) -> Cursor:
        """Whole warpgroup: hand on the numbers of a tile of which each thread has loaded its `shares`."""
        wide.wait()
        self._store(self.first + wide.stage * self.step, loaded)
        wide.arrive()
        return wide.next()

    @property
    def shares(self) -> list[tuple[int, int]]:
        """(group of rows, panel of 16-bit numbers) of each 16 bytes that a thread takes: in `row(group)`, from column
        `panel * COLUMNS + column()` on."""
        return [(group, panel) for group in range(self.groups) for panel in range(self.tile.panels)]

    @property
    def groups(self) -> int:
        return self.tile.rows // (ROWS * WARPS_PER_WARPGROUP)

    def row(self, group: int) -> Int32:
        """Of the tile, that this thread takes."""
        return self.first_row(group) + self.row_in_group()

    def column(self) -> Int32:
        """Of half a panel of bytes, the first that this thread takes."""
        return self.chunk() * _CHUNK

    def chunk(self) -> Int32:
        return cute.arch.lane_idx() % 4

    def row_in_group(self) -> Int32:
        """Of this thread. Eight threads, whose accesses go together, have four chunks each of two rows. Of rows whose
        numbers differ in bits 0 and 2 these meet no bank twice: chunks 0 to 3 as loaded, even or odd ones as stored."""
        lane = cute.arch.lane_idx()
        return lane // 8 ^ (lane // 4 % 2 * 5)

    def first_row(self, group: int) -> Int32:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        return (group * WARPS_PER_WARPGROUP + warp) * ROWS

    def _store(self, place_of_tile: Int32, loaded: list[list[Int32]]) -> None:
        row = self.row_in_group()
        own = place_of_tile + row * PANEL_ROW_BYTES + (2 * self.chunk() ^ row) * _CHUNK
        for (group, panel), words in zip(self.shares, loaded):
            place = own + self.first_row(group) * PANEL_ROW_BYTES + panel * self.tile.panel_bytes
            for half in range(2):
                wide = [
                    pair
                    for word in words[2 * half : 2 * half + 2]
                    for pair in upconverted(word, self.source, self.dtype)
                ]
                store_vec(_at(place ^ (half * _CHUNK)), wide)


@dataclass(frozen=True)
class ByteRing(Constant):
    """A ring of tiles of bytes in shared memory; as `Upconversion`, whose tiles have the same rows and columns."""

    first: Int32
    step: cutlass.Constexpr[int]
    tile: cutlass.Constexpr[Tile]

    def load(self, upconversion: Upconversion, stage: Int32) -> list[list[Int32]]:
        """A thread's shares of a stage."""
        row = upconversion.row_in_group()
        own = self.first + stage * self.step + row * PANEL_ROW_BYTES + (upconversion.chunk() ^ row) * _CHUNK
        loaded = []
        for group, panel in upconversion.shares:
            place = own + upconversion.first_row(group) * PANEL_ROW_BYTES + panel // 2 * self.tile.panel_bytes
            loaded.append(load_vec(_at(place ^ (panel % 2 * COLUMNS)), 4))
        return loaded


def _at(address: Int32) -> cute.Pointer:
    return cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=_CHUNK)
