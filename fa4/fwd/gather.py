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

from ..core.constant import Constant
from ..pipeline.roles import WARP, WARPS_PER_WARPGROUP
from ..pipeline.smem import PANEL_ROW_BYTES
from .key_rows import KeyRows

_CHUNK = 16  # bytes that a thread copies at a time
_LANES = PANEL_ROW_BYTES // _CHUNK  # that copy a row's part of a panel
_ROWS = WARP // _LANES  # that a warp copies at a time


@dataclass(frozen=True)
class Gather(Constant):
    """One thread's part in the blocks of keys of a work tile."""

    context: Any
    rows: KeyRows

    @staticmethod
    def of(context: Any, work: Any) -> Gather:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        count = context.cfg.tile_n // (WARPS_PER_WARPGROUP * _ROWS)
        own = tuple((warp * count + i) * _ROWS + cute.arch.lane_idx() // _LANES for i in range(count))
        return Gather(context, KeyRows.of(context, work, own))

    def look_up(self, block: Int32) -> None:
        """Ask for the pages of a block's rows; of a block that is none, for some."""
        self.rows.look_up(block)

    def copy(self, name: str, block: Int32, address: Int32) -> None:
        """Start to copy the rows of "k" or "v" of the block last asked for; rows and columns that do not exist become
        zeros."""
        x, tile = getattr(self.context.args, name), getattr(self.context.cfg, f"{name}_tile")
        lane = cute.arch.lane_idx() % _LANES
        elements = 8 * _CHUNK // tile.bits
        for i, row in enumerate(self.rows.own):
            source, exists = self.rows.source(x, block, i)
            own = address + row * PANEL_ROW_BYTES + (lane ^ (row % 8)) * _CHUNK
            for panel in range(tile.panels):
                column = panel * tile.panel_columns + lane * elements
                is_there = exists & (column < tile.columns)
                first = cutlass.select_(is_there, Int32(column), Int32(0))
                nbytes = cutlass.select_(is_there, Int32(_CHUNK), Int32(0))
                _copy(source + Int32(first), own + panel * tile.panel_bytes, Int32(nbytes))


def _copy(source: cute.Pointer, place: Int32, nbytes: Int32) -> None:
    """Start to copy 16 bytes, of which those from `nbytes` on become zeros."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[place, source.toint(), nbytes],
    )
