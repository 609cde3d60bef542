"""Rows of keys and values copied one by one into panelled tiles, where pages do not hold what TMA takes.

Eight threads copy 128 bytes of a row by `cp.async`, which writes shared memory as threads do, and not as TMA does: who
hands such a tile to the matrix unit has to wait for the copies and then to fence (`Channel.carries`). The places of a
block's rows are asked for while the block before is copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..core.cache import page_at
from ..core.constant import Constant
from ..core.sequence import Rows
from ..pipeline.roles import WARP, WARPS_PER_WARPGROUP
from ..pipeline.smem import PANEL_ROW_BYTES

_CHUNK = 16  # bytes that a thread copies at a time
_LANES = PANEL_ROW_BYTES // _CHUNK  # that copy a row's part of a panel
_ROWS = WARP // _LANES  # that a warp copies at a time


@dataclass(frozen=True)
class Gather(Constant):
    """One thread's part in the blocks of keys of a work tile. places: for each of its rows the page."""

    context: Any
    rows: Rows
    table: cute.Tensor
    head: Int32
    places: cute.Tensor

    @staticmethod
    def of(context: Any, work: Any) -> Gather:
        count = context.cfg.tile_n // (WARPS_PER_WARPGROUP * _ROWS)
        places = cute.make_rmem_tensor(count, Int32)
        return Gather(context, work.keys.rows, work.keys.table, work.head_kv, places)

    def look_up(self, block: Int32) -> None:
        """Ask for the pages of a block's rows; of a block that is none, for some."""
        pages, size = cute.size(self.context.args.k, mode=[3]), self.context.cfg.cache.page_size
        for i in range(cute.size(self.places)):
            self.places[i] = page_at(self.table, self._key(block, i)[0] // size, pages)

    def copy(self, name: str, block: Int32, address: Int32) -> None:
        """Start to copy the rows of "k" or "v" of the block last asked for; rows and columns that do not exist become
        zeros."""
        x, tile = getattr(self.context.args, name), getattr(self.context.cfg, f"{name}_tile")
        lane = cute.arch.lane_idx() % _LANES
        size, elements = self.context.cfg.cache.page_size, 8 * _CHUNK // tile.bits
        for i in range(cute.size(self.places)):
            key, exists = self._key(block, i)
            row = self._row(i)
            source = x.iterator + cute.crd2idx((key % size, 0, self.head, self.places[i]), x.layout)
            own = address + row * PANEL_ROW_BYTES + (lane ^ (row % 8)) * _CHUNK
            for panel in range(tile.panels):
                column = panel * tile.panel_columns + lane * elements
                is_there = exists & (column < tile.columns)
                first = cutlass.select_(is_there, Int32(column), Int32(0))
                nbytes = cutlass.select_(is_there, Int32(_CHUNK), Int32(0))
                _copy(source + Int32(first), own + panel * tile.panel_bytes, Int32(nbytes))

    def _row(self, i: int) -> Int32:
        """The i-th row of a tile that this thread has a part in."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        return (warp * cute.size(self.places) + i) * _ROWS + cute.arch.lane_idx() // _LANES

    def _key(self, block: Int32, i: int):
        """Where in the sequence's rows that of key `block * tile_n + row` is, or another that may be read, and whether
        there is such a key."""
        key = block * self.context.cfg.tile_n + self._row(i)
        return self.rows.first + cutlass.max(cutlass.min(key, self.rows.count - 1), 0), key < self.rows.count


def _copy(source: cute.Pointer, place: Int32, nbytes: Int32) -> None:
    """Start to copy 16 bytes, of which those from `nbytes` on become zeros."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[place, source.toint(), nbytes],
    )
