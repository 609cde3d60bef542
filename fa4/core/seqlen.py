"""Which rows of a packed or padded tensor belong to one sequence."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32


class Rows(NamedTuple):
    """A sequence's rows: `first` counts from the tensor's row 0 (0 unless varlen), `count` hold data."""

    first: Int32
    count: Int32

    @staticmethod
    def of(batch: Int32, extent: Int32, cu_seqlens: cute.Tensor | None, seqused: cute.Tensor | None) -> Rows:
        """Rows of sequence `batch` in a tensor of `extent` rows (dense), or packed by cu_seqlens (varlen).

        Args:
            cu_seqlens: (batch + 1,) int32 or, at compile time, None.
            seqused: (batch,) int32 or None; overrides the count.
        """
        first, count = Int32(0), extent
        if cu_seqlens is not None:
            first = cu_seqlens[batch]
            count = cu_seqlens[batch + 1] - first
        if seqused is not None:
            count = seqused[batch]
        return Rows(first, count)


def sequence_of(x: cute.Tensor, batch: Int32, rows: Rows, varlen: bool) -> cute.Tensor:
    """(rows, heads, dim) view of one sequence of a (batch, rows, heads, dim) or (total, heads, dim) tensor."""
    if varlen:
        return cute.domain_offset((rows.first, 0, 0), x)
    return x[batch, None, None, None]


def align_strides(x: cute.Tensor, bits: int = 128) -> cute.Tensor:
    """The same tensor, its strides (but the last) declared multiples of `bits`, so that wide copies are legal.

    An axis of extent 1 may carry any stride; it is never stepped along, so it counts as 0 here.
    """
    elements = bits // x.element_type.width
    strides: list[Any] = [
        cute.assume(stride * (extent != 1), divby=elements) for extent, stride in zip(x.shape[:-1], x.stride[:-1])
    ]
    return cute.make_tensor(x.iterator, cute.make_layout(x.shape, stride=(*strides, x.stride[-1])))


def padded_first(batch: Int32, rows: Rows, extent: Int32, group: int, tile_m: int, varlen: bool) -> Int32:
    """Where a sequence starts in buffers that pad every sequence's `group`-fold rows to tiles of tile_m.

    Varlen starts need no prefix sum: adding one tile per earlier sequence before rounding down leaves room for all.
    """
    if varlen:
        return (rows.first * group + batch * tile_m) // tile_m * tile_m
    return batch * ((extent * group + tile_m - 1) // tile_m * tile_m)
