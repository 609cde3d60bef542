"""One sequence of a batch on the device: which rows it has, and its matrix.

Kernels see tensors as matrices with modes (rows, columns, heads, batch), packed (varlen) ones without the batch. Three
layouts of the rows make loops simpler, and cost nothing where they are not used:

- with `group` heads packed, row r of a matrix is query r // group of head r % group of the group, so that a short
  query sequence fills a tile and each key is loaded once for the whole group;
- a `seq_bounded_tma` matrix ends where a sequence's data ends: TMA fills what comes after with zeros, and leaves it alone in a
  store; a tile that a load takes from one must hold some of the data (`clamp_tile`);
- the log-sum-exp of rows is a matrix with one column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32


class Rows(NamedTuple):
    """A sequence's rows: `first` counts from the tensor's row 0 (0 unless varlen); there are `count`."""

    first: Int32
    count: Int32


class Lengths(NamedTuple):
    """Where sequences begin and end: (batch + 1,) int32 for packed ones, and (batch,) int32 rows that hold data.

    Each is None, known at compile time, where there is none of it. most_q, most_k: what no sequence is taken to exceed,
    where CTAs wait for each other: what a sequence's length says is then launched, whatever bound the caller gave.
    """

    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None
    most_q: Int32 | None = None
    most_k: Int32 | None = None

    @property
    def varlen(self) -> bool:
        return self.cu_seqlens_q is not None

    def queries(self, batch: Int32, extent: Int32) -> Rows:
        """The query rows of sequence `batch` that hold data, in a dense tensor of `extent` rows or a packed one."""
        return _used(self.query_place(batch, extent), batch, self.seqused_q, self.most_q)

    def keys(self, batch: Int32, extent: Int32) -> Rows:
        """The key rows of sequence `batch` that hold data."""
        return _used(_place(batch, extent, self.cu_seqlens_k), batch, self.seqused_k, self.most_k)

    def bounded(self, most_q: Int32, most_k: Int32) -> Lengths:
        """The same with bounds; a dense batch has none but its own."""
        return self._replace(most_q=most_q, most_k=most_k) if self.varlen else self

    def query_place(self, batch: Int32, extent: Int32) -> Rows:
        """All query rows of sequence `batch`, also those that hold no data."""
        return _place(batch, extent, self.cu_seqlens_q)


def _place(batch: Int32, extent: Int32, cu_seqlens: cute.Tensor | None) -> Rows:
    if cu_seqlens is None:
        return Rows(Int32(0), extent)
    first = cu_seqlens[batch]
    return Rows(first, cu_seqlens[batch + 1] - first)


def _used(place: Rows, batch: Int32, seqused: cute.Tensor | None, most: Int32 | None) -> Rows:
    count = place.count if seqused is None else cutlass.min(seqused[batch], place.count)
    return Rows(place.first, count if most is None else cutlass.min(count, most))


def align_strides(x: cute.Tensor, bits: int = 128) -> cute.Tensor:
    """The same tensor, its strides (but the last) declared multiples of `bits`, so that wide copies are legal.

    An axis of extent 1 may carry any stride; it is never stepped along, so it counts as 0 here.
    """
    elements = bits // x.element_type.width
    strides: list[Any] = [
        cute.assume(stride * (extent != 1), divby=elements) for extent, stride in zip(x.shape[:-1], x.stride[:-1])
    ]
    return cute.make_tensor(x.iterator, cute.make_layout(x.shape, stride=(*strides, x.stride[-1])))


def as_matrices(x: cute.Tensor, group: int = 1) -> cute.Tensor:
    """(batch, rows, heads, dim) -> (rows, dim, heads, batch); varlen (rows, heads, dim) -> (rows, dim, heads).

    The `group` heads of a group become neighbouring rows: ((group, rows), dim, heads / group, ...).
    """
    x = align_strides(x)
    order = [1, 3, 2, 0] if cute.rank(x) == 4 else [0, 2, 1]
    return pack_heads(cute.make_tensor(x.iterator, cute.select(x.layout, mode=order)), group)


def as_columns(x: cute.Tensor, group: int = 1) -> cute.Tensor:
    """A number for each row, (batch, heads, rows) or varlen (heads, rows), as matrices with one column."""
    order = [2, 1, 0] if cute.rank(x) == 3 else [1, 0]
    of = cute.select(x.layout, mode=order)
    layout = cute.make_layout((of.shape[0], 1, *of.shape[1:]), stride=(of.stride[0], 0, *of.stride[1:]))
    return pack_heads(cute.make_tensor(x.iterator, layout), group)


def in_parts(x: cute.Tensor, as_views: Any, group: int, split: bool) -> cute.Tensor:
    """`x` by `as_matrices` or `as_columns`; if it is `split`, an axis of parts in front becomes the last mode."""
    if not split:
        return as_views(x, group)
    one = as_views(x[(0, *[None] * (cute.rank(x) - 1))], group)
    layout = cute.make_layout((*one.shape, x.shape[0]), stride=(*one.stride, x.stride[0]))
    return cute.make_tensor(x.iterator, layout)


def pack_heads(x: cute.Tensor, group: int) -> cute.Tensor:
    """(rows, dim, heads, ...) -> ((group, rows), dim, heads / group, ...): heads of a group become nearby rows."""
    if group == 1:
        return x
    shape, stride = x.shape, x.stride
    layout = cute.make_layout(
        ((group, shape[0]), shape[1], shape[2] // group, *shape[3:]),
        stride=((stride[2], stride[0]), stride[1], stride[2] * group, *stride[3:]),
    )
    return cute.make_tensor(x.iterator, layout)


def seq_bounded_tma(x: cute.Tensor) -> cute.Tensor:
    """Matrices (rows, columns, heads, ...) with one mode more, for a TMA map that ends where a sequence's data ends.

    Element (row, column, head, ..., shift) is x's (row + shift - rows, column, head, ...): the shift moves a sequence's
    last row to the last row of the map, and TMA fills what comes after with zeros, or leaves it alone when it stores.
    """
    rows, stride = extent(x), x.stride[0][1] if isinstance(x.shape[0], tuple) else x.stride[0]
    layout = cute.make_layout((*x.shape, rows + 1), stride=(*x.stride, stride))
    return cute.make_tensor(x.iterator - rows * stride, layout)


def extent(x: cute.Tensor) -> Int32:
    """How many rows `as_matrices` or `as_columns` found, whether heads are packed into them or not."""
    return x.shape[0][1] if isinstance(x.shape[0], tuple) else x.shape[0]


def sequence_matrix(
    x: cute.Tensor, head: Int32, batch: Int32, rows: Rows, varlen: bool, is_seq_bounded: bool = False
) -> cute.Tensor:
    """(rows, columns) of one (packed) head of one sequence, from matrices or the TMA coordinates of some.

    A ragged one ends with `rows`; others may go on with rows that are not the sequence's.
    """
    place, skipped = (head,) if varlen else (head, batch), rows.first
    if is_seq_bounded:
        place, skipped = (*place, rows.first + rows.count), extent(x) - rows.count
    matrix = x[(None, None, *place)]
    if not (varlen or is_seq_bounded):
        return matrix
    return cute.domain_offset(((0, skipped) if isinstance(x.shape[0], tuple) else skipped, 0), matrix)


def clamp_tile(tile: Int32, rows: Rows, size: int) -> Int32:
    """The tile of `size` rows, or if it holds none of `rows` the last one that does, for a load that takes part in
    what is nobody's result. TMA fills a box outside of a `seq_bounded_tma` matrix, but touches the place where the map begins,
    which may be outside of all memory: an H100 faults."""
    return cutlass.min(tile, (rows.count - 1) // size)


def modes_reversed(x: cute.Tensor) -> cute.Tensor:
    """The modes in opposite order: the contiguous one first."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(reversed(range(cute.rank(x))))))
