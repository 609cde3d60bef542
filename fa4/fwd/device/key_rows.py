"""K and V rows of a cache in global memory, loaded without TMA: their addresses, and copies to panelled tiles.

The rows of a sequence are contiguous, or lie in pages of any size. The page numbers of a block are loaded while the
block before it is read. Eight threads copy 128 bytes of a row by `cp.async`, which writes shared memory through the
generic proxy, unlike TMA: before the tensor core reads the tile, the producer waits for the copies and issues a proxy
fence (`Channel.carries`).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...core.cache import Keys, page_at
from ...core.constant import Constant
from ...pipeline.roles import WARP, WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES, Tile
from ..launch import ForwardContext
from ..variant import ForwardVariant
from .work import Work

_CHUNK = 16  # bytes per thread and copy
_LANES = PANEL_ROW_BYTES // _CHUNK  # lanes that copy the part of a row in one panel
_ROWS = WARP // _LANES  # rows that a warp copies at a time
_L2_LINE = 128  # bytes


def copied_rows(cfg: ForwardVariant, warps: int = WARPS_PER_WARPGROUP) -> tuple[Int32, ...]:
    """Rows of a key block that this thread copies, of so many warps that copy it together. The number of the first is a
    multiple of `warps`."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % warps
    return tuple(
        (i * warps + warp) * _ROWS + cute.arch.lane_idx() // _LANES for i in range(cfg.tile_n // (warps * _ROWS))
    )


@dataclass(frozen=True)
class KeyRows(Constant):
    """One thread's rows in each key block of a work tile. tile_rows: indices of these rows in the block. pages: page
    numbers of these rows for the block of the last `load_pages`."""

    context: ForwardContext
    keys: Keys
    head: Int32
    tile_rows: tuple[Int32, ...]
    pages: cute.Tensor

    @staticmethod
    def of(context: ForwardContext, work: Work, tile_rows: tuple[Int32, ...]) -> KeyRows:
        return KeyRows(context, work.keys, work.head_kv, tile_rows, cute.make_rmem_tensor(len(tile_rows), Int32))

    def load_pages(self, block: Int32) -> None:
        """Load the page numbers of a block's rows, if the cache has pages; of any valid rows if the block does not
        exist."""
        if self.keys.table is None:
            return
        pages, size = cute.size(self.context.args.k, mode=[3]), self.context.cfg.cache.page_size
        for i in range(len(self.tile_rows)):
            self.pages[i] = page_at(self.keys.table, self._key(block, i)[0] // size, pages)

    def source(self, x: cute.Tensor, block: Int32, i: int) -> tuple[cute.Pointer, Boolean]:
        """(pointer to the i-th row in k or v for the block of the last `load_pages`, True if that key exists); the
        pointer is valid in both cases."""
        row, exists = self._key(block, i)
        size = self.context.cfg.cache.page_size
        in_page, page = (row, self.keys.sequence) if size is None else (row % size, self.pages[i])
        return x.iterator + cute.crd2idx((in_page, 0, self.head, page), x.layout), exists

    def copy(self, name: str, block: Int32, address: Int32, panels: slice = slice(None)) -> None:
        """Start to copy the rows, those of `copied_rows`, of "k" or "v" for the block of the last `load_pages`; rows
        and columns out of bounds become zeros. panels: of the tile at `address`, those to copy."""
        x, tile = getattr(self.context.args, name), getattr(self.context.cfg, f"{name}_tile")
        for i, row in enumerate(self.tile_rows):
            copy_row(*self.source(x, block, i), tile, address, row, panels)

    def _key(self, block: Int32, i: int) -> tuple[Int32, Boolean]:
        """(row of key `block * tile_n + tile_rows[i]`, clamped to a valid row of the sequence; True if the key
        exists)."""
        rows, key = self.keys.rows, block * self.context.cfg.tile_n + self.tile_rows[i]
        return rows.first + cutlass.max(cutlass.min(key, rows.count - 1), 0), key < rows.count


def copy_row(
    source: cute.Pointer, exists: Boolean, tile: Tile, address: Int32, row: Int32, panels: slice = slice(None)
) -> None:
    """Start to copy this lane's part of a row to some panels of a tile at `address`; eight lanes copy a row. Columns
    out of bounds, and a row that does not exist, become zeros; `source` is a valid row in any case."""
    lane = cute.arch.lane_idx() % _LANES
    lane_columns = 8 * _CHUNK // tile.bits
    smem_address = address + row * PANEL_ROW_BYTES + (lane ^ (row % 8)) * _CHUNK
    in_row, nbytes = source + Int32(lane * lane_columns), Int32(cutlass.select_(exists, Int32(_CHUNK), Int32(0)))
    for panel in range(tile.panels)[panels]:
        if (panel + 1) * tile.panel_columns <= tile.columns:  # offsets that the instruction has
            copy_async(in_row, smem_address, nbytes, (panel * PANEL_ROW_BYTES, panel * tile.panel_bytes))
            continue
        column = panel * tile.panel_columns + lane * lane_columns
        in_bounds = exists & (column < tile.columns)
        first = cutlass.select_(in_bounds, Int32(column), Int32(0))
        nbytes = cutlass.select_(in_bounds, Int32(_CHUNK), Int32(0))
        copy_async(source + Int32(first), smem_address + panel * tile.panel_bytes, Int32(nbytes))


def copy_async(source: cute.Pointer, smem_address: Int32, nbytes: Int32, offsets: tuple[int, int] = (0, 0)) -> None:
    """Start to copy `nbytes` bytes and fill up to 16 with zeros. offsets: bytes beyond the source and the address."""
    pointers = f"[{{$r0}}+{offsets[1]}], [{{$r1}}+{offsets[0]}]"
    cute.arch.inline_ptx(
        f"cp.async.cg.shared.global {pointers}, 16, {{$r2}};", read_only_args=[smem_address, source.toint(), nbytes]
    )


def prefetch(source: cute.Pointer, nbytes: int) -> None:
    """Start to bring `nbytes` bytes, from the start of a line on, to the L2 cache. All lanes of a warp do so at the
    same time; bulk prefetches of its lanes, whose addresses are in uniform registers, would be issued one by one."""
    for line in range(0, nbytes, _L2_LINE):
        cute.arch.inline_ptx(f"prefetch.global.L2 [{{$r0}}+{line}];", read_only_args=[source.toint()])
