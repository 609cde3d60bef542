"""Rows of keys and values in plain memory: where those of a block lie, and their bytes on the way to registers.

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
from ..core.words import load_words
from ..pipeline.widen import COLUMNS, Widening

_WORDS = 4  # that a thread loads at a time


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


@dataclass(frozen=True)
class Fetch(Constant):
    """One thread's `Widening.shares` of the bytes of k or v, a block ahead. held: the words of one block."""

    x: cute.Tensor
    columns: cutlass.Constexpr[int]
    widening: Widening
    rows: KeyRows
    held: cute.Tensor

    @staticmethod
    def of(context: Any, name: str, work: Any, widening: Widening) -> Fetch:
        own = tuple(widening.row(group) for group in range(widening.groups))
        held = cute.make_rmem_tensor(_WORDS * len(widening.shares), Int32)
        columns = getattr(context.cfg, f"{name}_tile").columns
        return Fetch(getattr(context.args, name), columns, widening, KeyRows.of(context, work, own), held)

    def look_up(self, block: Int32) -> None:
        """Before the first `ask`."""
        self.rows.look_up(block)

    def ask(self, block: Int32, following: Int32) -> None:
        """Start to load a block's bytes, the one last looked up, and look up the following one. Rows that are no keys
        are some that are, and so are columns."""
        sources = [self.rows.source(self.x, block, i)[0] for i in range(self.widening.groups)]
        for i, (group, panel) in enumerate(self.widening.shares):
            column = panel * COLUMNS + self.widening.column()
            if self.columns % COLUMNS:
                column = cutlass.min(column, self.columns - 4 * _WORDS)
            for j, word in enumerate(load_words(sources[group] + column, _WORDS)):
                self.held[_WORDS * i + j] = word
        self.look_up(following)

    def words(self) -> list[list[Int32]]:
        """What was asked for."""
        return [[self.held[_WORDS * i + j] for j in range(_WORDS)] for i in range(len(self.widening.shares))]
