"""Where the key rows of a sequence lie: one after the other, or in pages of a cache.

A kernel asks `Keys.of` for its sequence. One that loads by TMA takes blocks by `pieces_of`, whole where pages hold
them whole, else in pieces that they do. Others get of k and of v a `Strided` or a `Paged`, by `of_head`. Where
blocks of keys lie evenly in memory (`lies_evenly`), as they do in pages that hold whole blocks, it takes them by
`block`; else it takes rows one by one, by `rows_from`. Rows of no key have no place: entries of a page table that are
past the sequence's end are not looked at, and lengths or page numbers beyond the cache are cut to what there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .. import jit
from ..spec import CacheSpec
from .constant import Constant
from .sequence import Lengths, Rows, clamp_tile, extent, sequence_matrix


class CacheTensors(NamedTuple):
    """The tensors of a `spec.Cache`; None for what there is none of, known at compile time. A launch takes None in
    place of a record without any: for the compiler that is no argument."""

    page_table: cute.Tensor | None = None
    batch_idx: cute.Tensor | None = None
    leftpad: cute.Tensor | None = None
    k_descale: cute.Tensor | None = None
    v_descale: cute.Tensor | None = None

    @staticmethod
    def fake(spec: CacheSpec | None) -> CacheTensors | None:
        """Stand-ins for compilation."""
        if spec is None or not spec.has_tensors:
            return None
        table = jit.fake_tensor(Int32, 2, align=4) if spec.page_size is not None else None
        batch_idx, leftpad = (
            jit.fake_tensor(Int32, 1, align=4) if there else None for there in (spec.has_batch_idx, spec.has_leftpad)
        )
        descales = (jit.fake_tensor(Float32, 2, align=4) if spec.has_bytes else None for _ in range(2))
        return CacheTensors(table, batch_idx, leftpad, *descales)


def page_at(table: cute.Tensor, place: Int32, pages: Int32) -> Int32:
    """The page at a place of a sequence's table, of which there are `pages`."""
    return cutlass.max(cutlass.min(table[place], pages - 1), 0)


@dataclass(frozen=True)
class Strided(Constant):
    """Rows of one head of k or v, evenly apart. matrix: (rows, dim) from the sequence's first key on; of these there
    are `count`."""

    matrix: cute.Tensor
    count: Int32

    def lies_evenly(self, tile_n: int) -> bool:
        return True

    def block(self, n: Int32, tile_n: int, dim: int) -> cute.Tensor:
        """(tile_n, dim): the n-th block of keys; its last rows may not be the sequence's."""
        return cute.local_tile(self.matrix, (tile_n, dim), (None, 0))[None, None, n]

    def rows_from(self, first: Int32) -> Callable[[Int32], tuple[cute.Pointer, Boolean]]:
        """What gives an address that may be read for key first + i, its own if there is such a key, and whether."""

        def row(i: Int32) -> tuple[cute.Pointer, Boolean]:
            key = first + i
            place = (cutlass.min(key, self.count - 1), 0)
            return self.matrix.iterator + cute.crd2idx(place, self.matrix.layout), key < self.count

        return row


@dataclass(frozen=True)
class Paged(Constant):
    """Rows of one head of k or v in pages. pages: (rows of a page, dim, pages). table: page numbers of the sequence.
    rows: which of the sequence's rows are keys."""

    pages: cute.Tensor
    table: cute.Tensor
    rows: Rows
    size: cutlass.Constexpr[int]
    is_shifted: cutlass.Constexpr[bool]

    def lies_evenly(self, tile_n: int) -> bool:
        return self.size % tile_n == 0 and not self.is_shifted

    def page(self, place: Int32) -> Int32:
        """The page at a place of the table."""
        return page_at(self.table, place, cute.size(self.pages, mode=[2]))

    def block(self, n: Int32, tile_n: int, dim: int) -> cute.Tensor:
        """(tile_n, dim): the n-th block of keys, if blocks lie evenly."""
        of_page = self.size // tile_n
        page = self.pages[(None, None, self.page(n // of_page))]
        return cute.local_tile(page, (tile_n, dim), (None, 0))[None, None, n % of_page]

    def rows_from(self, first: Int32) -> Callable[[Int32], tuple[cute.Pointer, Boolean]]:
        """As those of `Strided`."""

        def row(i: Int32) -> tuple[cute.Pointer, Boolean]:
            key = first + i
            at = self.rows.first + cutlass.min(key, self.rows.count - 1)
            place = (at % self.size, 0, self.page(at // self.size))
            return self.pages.iterator + cute.crd2idx(place, self.pages.layout), key < self.rows.count

        return row


@dataclass(frozen=True)
class Keys(Constant):
    """The key rows of one sequence. `sequence` is the place in k and v of an unpaged one."""

    rows: Rows
    sequence: Int32
    table: cute.Tensor | None
    varlen: cutlass.Constexpr[bool]
    spec: cutlass.Constexpr[CacheSpec | None]

    @staticmethod
    def of(lengths: Lengths, cache: CacheTensors | None, k: cute.Tensor, sequence: Int32, cfg: Any) -> Keys:
        """Of a sequence; k: as `as_matrices` has it."""
        spec, cache = cfg.cache, cache or CacheTensors()
        if spec is None:
            return Keys(lengths.keys(sequence, extent(k)), sequence, None, cfg.varlen_k, None)
        table, capacity, place = None, extent(k), sequence
        if spec.page_size is not None:
            table = cache.page_table[(sequence, None)]
            capacity = cute.size(table) * spec.page_size
        elif spec.has_batch_idx:
            place = cutlass.max(cutlass.min(cache.batch_idx[sequence], cute.size(k, mode=[3]) - 1), 0)
        stop = cutlass.min(lengths.keys(sequence, capacity).count, capacity)
        first = cutlass.max(cache.leftpad[sequence], 0) if spec.has_leftpad else Int32(0)
        return Keys(Rows(first, cutlass.max(stop - first, 0)), place, table, False, spec)

    @property
    def count(self) -> Int32:
        return self.rows.count

    def pieces_of(
        self, x: cute.Tensor, head: Int32, n: Int32, tile_n: int, pieces: int, is_seq_bounded: bool
    ) -> list[tuple[cute.Tensor, Int32]]:
        """Of each of `pieces` equal stretches of the n-th block of keys, the (rows, columns) of k or v that hold it,
        and which stretch of these it is; x: matrices, or TMA coordinates of some that may be `seq_bounded_tma`.

        For stretches past the last key that one's stands in (`clamp_tile`), whose rows nobody takes for theirs.
        """
        if pieces == 1:
            return [self._stretch(x, head, n, tile_n, is_seq_bounded)]
        rows = tile_n // pieces
        numbers = [clamp_tile(n * pieces + i, self.rows, rows) for i in range(pieces)]
        return [self._stretch(x, head, number, rows, is_seq_bounded) for number in numbers]

    def _stretch(
        self, x: cute.Tensor, head: Int32, n: Int32, tile_n: int, is_seq_bounded: bool
    ) -> tuple[cute.Tensor, Int32]:
        """One that a page holds whole."""
        if self.table is None:
            return sequence_matrix(x, head, self.sequence, self.rows, self.varlen, is_seq_bounded), n
        size = self.spec.page_size
        place, of_page = n // (size // tile_n), n % (size // tile_n)
        held = Rows(Int32(0), cutlass.min(self.count - place * size, size))
        page = page_at(self.table, place, cute.size(x, mode=[3]))
        return sequence_matrix(x, head, page, held, False, is_seq_bounded), of_page

    def of_head(self, x: cute.Tensor, head: Int32) -> Strided | Paged:
        """One head's rows in k or v."""
        if self.spec is None:
            return Strided(sequence_matrix(x, head, self.sequence, self.rows, self.varlen), self.count)
        if self.table is not None:
            return Paged(x[(None, None, head, None)], self.table, self.rows, self.spec.page_size, self.spec.has_leftpad)
        matrix = x[(None, None, head, self.sequence)]
        matrix = cute.domain_offset((self.rows.first, 0), matrix) if self.spec.has_leftpad else matrix
        return Strided(matrix, self.count)
