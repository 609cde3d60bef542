"""Addresses of K and V rows in global memory, for kernels that load them without TMA.

The rows of a sequence lie in pages of any size. The page numbers of a block are loaded while the
block before it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...core.cache import Keys, page_at
from ...core.constant import Constant
from ..launch import ForwardContext
from .work import Work


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
        """Load the page numbers of a block's rows; of any valid rows if the block does not exist."""
        pages, size = cute.size(self.context.args.k, mode=[3]), self.context.cfg.cache.page_size
        for i in range(len(self.tile_rows)):
            self.pages[i] = page_at(self.keys.table, self._key(block, i)[0] // size, pages)

    def source(self, x: cute.Tensor, block: Int32, i: int) -> tuple[cute.Pointer, Boolean]:
        """(pointer to the i-th row in k or v for the block of the last `load_pages`, True if that key exists); the
        pointer is valid in both cases."""
        row, exists = self._key(block, i)
        coord = row % self.context.cfg.cache.page_size, 0, self.head, self.pages[i]
        return x.iterator + cute.crd2idx(coord, x.layout), exists

    def _key(self, block: Int32, i: int) -> tuple[Int32, Boolean]:
        """(row of key `block * tile_n + tile_rows[i]`, clamped to a valid row of the sequence; True if the key
        exists)."""
        rows, key = self.keys.rows, block * self.context.cfg.tile_n + self.tile_rows[i]
        return rows.first + cutlass.max(cutlass.min(key, rows.count - 1), 0), key < rows.count
