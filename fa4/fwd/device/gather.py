"""Gather of K and V rows by `cp.async` into panelled tiles, for page sizes that TMA cannot load.

Eight threads copy 128 bytes of a row. `cp.async` writes shared memory through the generic proxy, unlike TMA: before the
tensor core reads the tile, the producer waits for the copies and issues a proxy fence (`Channel.carries`). The page
numbers of a block are loaded while the block before it is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...core.constant import Constant
from ...pipeline.roles import WARP, WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ..launch import ForwardContext
from .key_rows import KeyRows
from .work import Work

_CHUNK = 16  # bytes per thread and copy
_LANES = PANEL_ROW_BYTES // _CHUNK  # lanes that copy the part of a row in one panel
_ROWS = WARP // _LANES  # rows that a warp copies at a time


@dataclass(frozen=True)
class Gather(Constant):
    """One thread's share of the key blocks of a work tile."""

    context: ForwardContext
    rows: KeyRows

    @staticmethod
    def of(context: ForwardContext, work: Work) -> Gather:
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        count = context.cfg.tile_n // (WARPS_PER_WARPGROUP * _ROWS)
        tile_rows = tuple((warp * count + i) * _ROWS + cute.arch.lane_idx() // _LANES for i in range(count))
        return Gather(context, KeyRows.of(context, work, tile_rows))

    def load_pages(self, block: Int32) -> None:
        """Load the page numbers of a block's rows; of any valid rows if the block does not exist."""
        self.rows.load_pages(block)

    def copy(self, name: str, block: Int32, address: Int32) -> None:
        """Start to copy the rows of "k" or "v" for the block of the last `load_pages`; rows and columns out of bounds
        become zeros."""
        x, tile = getattr(self.context.args, name), getattr(self.context.cfg, f"{name}_tile")
        lane = cute.arch.lane_idx() % _LANES
        lane_columns = 8 * _CHUNK // tile.bits
        for i, row in enumerate(self.rows.tile_rows):
            source, exists = self.rows.source(x, block, i)
            smem_address = address + row * PANEL_ROW_BYTES + (lane ^ (row % 8)) * _CHUNK
            for panel in range(tile.panels):
                column = panel * tile.panel_columns + lane * lane_columns
                in_bounds = exists & (column < tile.columns)
                first = cutlass.select_(in_bounds, Int32(column), Int32(0))
                nbytes = cutlass.select_(in_bounds, Int32(_CHUNK), Int32(0))
                _copy(source + Int32(first), smem_address + panel * tile.panel_bytes, Int32(nbytes))


def _copy(source: cute.Pointer, smem_address: Int32, nbytes: Int32) -> None:
    """Start to copy `nbytes` bytes and fill up to 16 with zeros."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};", read_only_args=[smem_address, source.toint(), nbytes]
    )
