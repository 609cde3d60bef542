"""Addresses of a sequence's key rows: contiguous, or in pages of a KV cache.

`Keys.of` returns the keys of a sequence. TMA kernels load blocks by `pieces_of`: whole blocks if pages hold them whole,
else pieces that pages hold whole. Other kernels get a `Strided` or a `Paged` of k and of v by `of_head`. If the rows of
a block have a constant stride (`has_constant_stride`), also within pages, they load it by `block`, else row by row by
`rows_from`. Page-table entries past the sequence's end are never read. Lengths and page indices beyond the cache are
clamped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint8

from ..runtime import jit
from ..runtime.spec import CacheSpec
from .constant import Constant
from .rows import Rows, clamp_tile
from .sequence import Lengths, extent, sequence_matrix
from .variant import Variant


class CacheTensors(NamedTuple):
    """The tensors of a `spec.Cache`; k_descale, v_descale: also the factors of `spec.Operands`. Scales of `nvfp4` are
    passed as uint8. q_scales, k_scales, v_scales: in the layout of the chip's kernel, (batch, heads, tiles, bytes)
    uint8. A missing tensor is None at compile time. If all are missing, a launch takes None instead of the record,
    since the compiler drops an empty record as an argument."""

    page_table: cute.Tensor | None = None
    batch_idx: cute.Tensor | None = None
    leftpad: cute.Tensor | None = None
    k_descale: cute.Tensor | None = None
    v_descale: cute.Tensor | None = None
    q_scales: cute.Tensor | None = None
    k_scales: cute.Tensor | None = None
    v_scales: cute.Tensor | None = None

    @staticmethod
    def fake(cfg: Variant) -> CacheTensors | None:
        """Return fake arguments for compilation."""
        spec = cfg.cache or CacheSpec()
        if not (spec.has_tensors or cfg.has_factors or cfg.has_block_scales):
            return None
        table = jit.fake_tensor(Int32, 2, align=4) if spec.page_size is not None else None
        batch_idx, leftpad = (
            jit.fake_tensor(Int32, 1, align=4) if exists else None for exists in (spec.has_batch_idx, spec.has_leftpad)
        )
        descales = (jit.fake_tensor(Float32, 2, align=4) if cfg.has_factors else None for _ in range(2))
        if cfg.is_nvfp4:
            descales = (jit.fake_tensor(Uint8, 4, align=1) for _ in range(2))
        of_blocks = (jit.fake_tensor(Uint8, 4, contiguous=True) if cfg.has_block_scales else None for _ in range(3))
        return CacheTensors(table, batch_idx, leftpad, *descales, *of_blocks)

    def scales(self, name: str) -> cute.Tensor:
        """Return the scales of "k" or "v" of `runtime.nvfp4`, (rows of a page, columns / 16, heads, pages)."""
        x = self.k_descale if name == "k" else self.v_descale
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 3, 2, 0]))


def page_at(table: cute.Tensor, index: Int32, pages: Int32) -> Int32:
    """Return the page at an index of a sequence's page table, clamped to the `pages` pages of the cache."""
    return cutlass.max(cutlass.min(table[index], pages - 1), 0)


@dataclass(frozen=True)
class Strided(Constant):
    """Rows of one head of k or v with a constant stride. matrix: (rows, dim), starting at the sequence's first key.
    count: number of keys."""

    matrix: cute.Tensor
    count: Int32

    def has_constant_stride(self, tile_n: int) -> bool:
        return True

    def block(self, n: Int32, tile_n: int, dim: int) -> cute.Tensor:
        """(tile_n, dim): the n-th key block; its last rows may belong to another sequence."""
        return cute.local_tile(self.matrix, (tile_n, dim), (None, 0))[None, None, n]

    def rows_from(self, first: Int32) -> Callable[[Int32], tuple[cute.Pointer, Boolean]]:
        """Return a function of i: (readable address, whether key first + i exists). If so, the address is its own."""

        def row(i: Int32) -> tuple[cute.Pointer, Boolean]:
            key = first + i
            coord = (cutlass.min(key, self.count - 1), 0)
            return self.matrix.iterator + cute.crd2idx(coord, self.matrix.layout), key < self.count

        return row


@dataclass(frozen=True)
class Paged(Constant):
    """Rows of one head of k or v in pages. pages: (rows per page, dim, pages). table: page indices of the sequence.
    rows: the rows of the sequence that are keys. size: rows per page."""

    pages: cute.Tensor
    table: cute.Tensor
    rows: Rows
    size: cutlass.Constexpr[int]
    has_leftpad: cutlass.Constexpr[bool]

    def has_constant_stride(self, tile_n: int) -> bool:
        return self.size % tile_n == 0 and not self.has_leftpad

    def page(self, index: Int32) -> Int32:
        """Return the page at an index of the table."""
        return page_at(self.table, index, cute.size(self.pages, mode=[2]))

    def block(self, n: Int32, tile_n: int, dim: int) -> cute.Tensor:
        """(tile_n, dim): the n-th key block, if `has_constant_stride`."""
        per_page = self.size // tile_n
        page = self.pages[(None, None, self.page(n // per_page))]
        return cute.local_tile(page, (tile_n, dim), (None, 0))[None, None, n % per_page]

    def rows_from(self, first: Int32) -> Callable[[Int32], tuple[cute.Pointer, Boolean]]:
        """As `Strided.rows_from`."""

        def row(i: Int32) -> tuple[cute.Pointer, Boolean]:
            key = first + i
            cache_row = self.rows.first + cutlass.min(key, self.rows.count - 1)
            coord = (cache_row % self.size, 0, self.page(cache_row // self.size))
            return self.pages.iterator + cute.crd2idx(coord, self.pages.layout), key < self.rows.count

        return row


@dataclass(frozen=True)
class Keys(Constant):
    """Key rows of one sequence. sequence: batch index in k and v if there is no page table. is_moved: see `moved`."""

    rows: Rows
    sequence: Int32
    table: cute.Tensor | None
    varlen: cutlass.Constexpr[bool]
    spec: cutlass.Constexpr[CacheSpec | None]
    is_moved: cutlass.Constexpr[bool] = False

    @staticmethod
    def of(lengths: Lengths, cache: CacheTensors | None, k: cute.Tensor, sequence: Int32, cfg: Variant) -> Keys:
        """Return the keys of a sequence. k: from `as_matrices`."""
        spec, cache = cfg.cache, cache or CacheTensors()
        if spec is None:
            return Keys(lengths.keys(sequence, extent(k)), sequence, None, cfg.varlen_k, None)
        table, capacity, entry = None, extent(k), sequence
        if spec.page_size is not None:
            table = cache.page_table[(sequence, None)]
            capacity = cute.size(table) * spec.page_size
        elif spec.has_batch_idx:
            entry = cutlass.max(cutlass.min(cache.batch_idx[sequence], cute.size(k, mode=[3]) - 1), 0)
        stop = cutlass.min(lengths.keys(sequence, capacity).count, capacity)
        first = cutlass.max(cache.leftpad[sequence], 0) if spec.has_leftpad else Int32(0)
        return Keys(Rows(first, cutlass.max(stop - first, 0)), entry, table, False, spec)

    @property
    def count(self) -> Int32:
        return self.rows.count

    def moved(self, key: Int32) -> Keys:
        """Return the keys from `key` on, of a dense batch. TMA loads zeros for keys before the first, if `key` is
        negative."""
        return replace(self, rows=Rows(self.rows.first + key, self.rows.count - key), is_moved=True)

    def pieces_of(
        self, x: cute.Tensor, head: Int32, n: Int32, tile_n: int, pieces: int, is_seq_bounded: bool
    ) -> list[tuple[cute.Tensor, Int32]]:
        """Return, for each of `pieces` equal pieces of the n-th key block, the (rows, columns) of k or v that hold it,
        and its tile index there. x: matrices or their TMA coordinates, possibly `seq_bounded_tma`.

        Pieces past the last key are replaced by the last key's piece (`clamp_tile`); their rows are not used.
        """
        if pieces == 1:
            return [self._piece(x, head, n, tile_n, is_seq_bounded)]
        rows = tile_n // pieces
        tiles = [clamp_tile(n * pieces + i, self.rows, rows) for i in range(pieces)]
        return [self._piece(x, head, tile, rows, is_seq_bounded) for tile in tiles]

    def _piece(
        self, x: cute.Tensor, head: Int32, n: Int32, tile_n: int, is_seq_bounded: bool
    ) -> tuple[cute.Tensor, Int32]:
        """As `pieces_of`, for one piece of `tile_n` rows that a page holds whole."""
        if self.table is None:
            matrix = sequence_matrix(x, head, self.sequence, self.rows, self.varlen, is_seq_bounded)
            return cute.domain_offset((self.rows.first, 0), matrix) if self.is_moved else matrix, n
        size = self.spec.page_size
        index, in_page = n // (size // tile_n), n % (size // tile_n)
        page_rows = Rows(Int32(0), cutlass.min(self.count - index * size, size))
        page = page_at(self.table, index, cute.size(x, mode=[3]))
        return sequence_matrix(x, head, page, page_rows, False, is_seq_bounded), in_page

    def of_head(self, x: cute.Tensor, head: Int32) -> Strided | Paged:
        """Return the rows of one head of k or v."""
        if self.spec is None:
            return Strided(sequence_matrix(x, head, self.sequence, self.rows, self.varlen), self.count)
        if self.table is not None:
            return Paged(x[(None, None, head, None)], self.table, self.rows, self.spec.page_size, self.spec.has_leftpad)
        matrix = x[(None, None, head, self.sequence)]
        matrix = cute.domain_offset((self.rows.first, 0), matrix) if self.spec.has_leftpad else matrix
        return Strided(matrix, self.count)
