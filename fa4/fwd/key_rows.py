"""Rows of keys and values in plain memory: where those of a block lie.

A sequence's rows follow each other, or lie in pages of any size. The pages of a block's rows are asked for while the
block before is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..core.cache import Keys, page_at
from ..core.constant import Constant


@dataclass(frozen=True)
class KeyRows(Constant):
    """Some rows of each block of keys of a work tile. own: which of a block. pages: that the rows of the block last
    asked for are in; None where there are no pages."""

    context: Any
    keys: Keys
    head: Int32
    own: tuple[Int32, ...]
    pages: cute.Tensor | None

    @staticmethod
    def of(context: Any, work: Any, own: tuple[Int32, ...]) -> KeyRows:
        pages = None if work.keys.table is None else cute.make_rmem_tensor(len(own), Int32)
        return KeyRows(context, work.keys, work.head_kv, own, pages)

    def look_up(self, block: Int32) -> None:
        """Ask for the pages of a block's rows; of a block that is none, for some."""
        if self.pages is None:
            return
        pages, size = cute.size(self.context.args.k, mode=[3]), self.context.cfg.cache.page_size
        for i in range(len(self.own)):
            self.pages[i] = page_at(self.keys.table, self._key(block, i)[0] // size, pages)

    def source(self, x: cute.Tensor, block: Int32, i: int) -> tuple[cute.Pointer, Boolean]:
        """Where the i-th row is in k or v, of the block last asked for, and whether there is such a key; if not, a row
        that may be read."""
        row, exists = self._key(block, i)
        if self.pages is None:
            place = row, 0, self.head, self.keys.sequence
        else:
            place = row % self.context.cfg.cache.page_size, 0, self.head, self.pages[i]
        return x.iterator + cute.crd2idx(place, x.layout), exists

    def _key(self, block: Int32, i: int) -> tuple[Int32, Boolean]:
        """Where in the sequence's rows that of key `block * tile_n + own[i]` is, or another that may be read, and
        whether there is such a key."""
        rows, key = self.keys.rows, block * self.context.cfg.tile_n + self.own[i]
        return rows.first + cutlass.max(cutlass.min(key, rows.count - 1), 0), key < rows.count
