"""One sequence of a batch on the device: its rows and its matrix.

Kernels use tensors as matrices with modes (rows, columns, heads, batch); varlen matrices have no batch mode. Three row
layouts simplify loops, at no cost where they are not used:

- pack_gqa: with `group` packed heads, row r of a matrix is query r // group of the group's head r % group. A short
  query sequence fills a tile, and each key is loaded once per group.
- A `seq_bounded_tma` matrix ends with the sequence's data: TMA loads zeros after it and stores nothing there. A tile to
  load must contain some of the data (`clamp_tile`).
- The log-sum-exp of rows is a matrix with one column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .rows import Rows


class Lengths(NamedTuple):
    """Sequence lengths: cu_seqlens (batch + 1,) int32 of varlen tensors, seqused (batch,) int32 rows that hold data.

    A missing tensor is None at compile time. max_q, max_k: upper bounds of all lengths, for kernels whose CTAs wait for
    each other: no sequence then needs a CTA that is not launched, whatever bound the caller gave.
    """

    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    max_q: Int32 | None = None
    max_k: Int32 | None = None

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    def queries(self, batch: Int32, extent: Int32) -> Rows:
        """Query rows of sequence `batch` that hold data. extent: rows of a dense tensor; unused if varlen."""
        return _used(self.query_rows_of(batch, extent), batch, self.seqused_q, self.max_q)

    def keys(self, batch: Int32, extent: Int32) -> Rows:
        """Key rows of sequence `batch` that hold data."""
        return _used(_all_rows(batch, extent, self.cu_seqlens_k), batch, self.seqused_k, self.max_k)

    def bounded(self, max_q: Int32, max_k: Int32) -> Lengths:
        """Return these lengths with bounds if varlen; a dense batch needs none."""
        return self._replace(max_q=max_q, max_k=max_k) if self.varlen else self

    def query_rows_of(self, batch: Int32, extent: Int32) -> Rows:
        """All query rows of sequence `batch`, including padding rows."""
        return _all_rows(batch, extent, self.cu_seqlens_q)


def _all_rows(batch: Int32, extent: Int32, cu_seqlens: cute.Tensor | None) -> Rows:
    if cu_seqlens is None:
        return Rows(Int32(0), extent)
    first = cu_seqlens[batch]
    return Rows(first, cu_seqlens[batch + 1] - first)


def _used(rows: Rows, batch: Int32, seqused: cute.Tensor | None, max_count: Int32 | None) -> Rows:
    count = rows.count if seqused is None else cutlass.min(seqused[batch], rows.count)
    return Rows(rows.first, count if max_count is None else cutlass.min(count, max_count))


def align_strides(x: cute.Tensor, bits: int = 128) -> cute.Tensor:
    """Return the tensor with all strides but the last declared multiples of `bits`, to allow wide copies.

    The stride of an axis of size 1 may be anything and is never used: it becomes 0.
    """
    elements = bits // x.element_type.width
    strides: list[Any] = [
        cute.assume(stride * (size != 1), divby=elements) for size, stride in zip(x.shape[:-1], x.stride[:-1])
    ]
    return cute.make_tensor(x.iterator, cute.make_layout(x.shape, stride=(*strides, x.stride[-1])))


def as_matrices(x: cute.Tensor, group: int = 1) -> cute.Tensor:
    """(batch, rows, heads, dim) -> (rows, dim, heads, batch); varlen (rows, heads, dim) -> (rows, dim, heads).

    With `group` > 1, the heads of a group become neighbouring rows: ((group, rows), dim, heads / group, ...).
    """
    x = align_strides(x)
    order = [1, 3, 2, 0] if cute.rank(x) == 4 else [0, 2, 1]
    return pack_heads(cute.make_tensor(x.iterator, cute.select(x.layout, mode=order)), group)


def as_columns(x: cute.Tensor, group: int = 1) -> cute.Tensor:
    """Per-row values, (batch, heads, rows) or varlen (heads, rows), as matrices with one column."""
    order = [2, 1, 0] if cute.rank(x) == 3 else [1, 0]
    modes = cute.select(x.layout, mode=order)
    layout = cute.make_layout((modes.shape[0], 1, *modes.shape[1:]), stride=(modes.stride[0], 0, *modes.stride[1:]))
    return pack_heads(cute.make_tensor(x.iterator, layout), group)


def in_parts(
    x: cute.Tensor, as_views: Callable[[cute.Tensor, int], cute.Tensor], group: int, split: bool
) -> cute.Tensor:
    """Apply `as_matrices` or `as_columns`. With `split` (split-KV), the leading axis of parts becomes the last mode."""
    if not split:
        return as_views(x, group)
    first_part = as_views(x[(0, *[None] * (cute.rank(x) - 1))], group)
    layout = cute.make_layout((*first_part.shape, x.shape[0]), stride=(*first_part.stride, x.stride[0]))
    return cute.make_tensor(x.iterator, layout)


def pack_heads(x: cute.Tensor, group: int) -> cute.Tensor:
    """(rows, dim, heads, ...) -> ((group, rows), dim, heads / group, ...): a group's heads are neighbouring rows."""
    if group == 1:
        return x
    shape, stride = x.shape, x.stride
    layout = cute.make_layout(
        ((group, shape[0]), shape[1], shape[2] // group, *shape[3:]),
        stride=((stride[2], stride[0]), stride[1], stride[2] * group, *stride[3:]),
    )
    return cute.make_tensor(x.iterator, layout)


def seq_bounded_tma(x: cute.Tensor) -> cute.Tensor:
    """Matrices (rows, columns, heads, ...) with an extra mode, for a TMA map that ends with a sequence's data.

    Element (row, column, head, ..., shift) is x's (row + shift - rows, column, head, ...). The shift moves a sequence's
    last row to the last row of the map. After it, TMA loads zeros and stores nothing.
    """
    rows, stride = extent(x), x.stride[0][1] if isinstance(x.shape[0], tuple) else x.stride[0]
    layout = cute.make_layout((*x.shape, rows + 1), stride=(*x.stride, stride))
    return cute.make_tensor(x.iterator - rows * stride, layout)


def extent(x: cute.Tensor) -> Int32:
    """Rows of a tensor from `as_matrices` or `as_columns`; packed heads are not counted."""
    return x.shape[0][1] if isinstance(x.shape[0], tuple) else x.shape[0]


def sequence_matrix(
    x: cute.Tensor, head: Int32, batch: Int32, rows: Rows, varlen: bool, is_seq_bounded: bool = False
) -> cute.Tensor:
    """Return (rows, columns) of one (packed) head of one sequence. x: matrices or their TMA coordinates.

    If `is_seq_bounded`, the result ends with `rows`; else rows of other sequences may follow.
    """
    coord, offset = (head,) if varlen else (head, batch), rows.first
    if is_seq_bounded:
        coord, offset = (*coord, rows.first + rows.count), extent(x) - rows.count
    matrix = x[(None, None, *coord)]
    if not (varlen or is_seq_bounded):
        return matrix
    return cute.domain_offset(((0, offset) if isinstance(x.shape[0], tuple) else offset, 0), matrix)


def modes_reversed(x: cute.Tensor) -> cute.Tensor:
    """Return the tensor with its modes in reverse order: the contiguous mode first."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(reversed(range(cute.rank(x))))))


@cute.jit
def sequence_of(cu_seqlens: cute.Tensor, row: Int32):
    """Binary search: last sequence that starts at or before `row`."""
    found, stop = Int32(0), Int32(cute.size(cu_seqlens)) - 1
    while stop - found > 1:
        middle = (found + stop) // 2
        is_after = cu_seqlens[middle] > row
        found = Int32(cutlass.select_(is_after, found, middle))
        stop = Int32(cutlass.select_(is_after, middle, stop))
    return found
