"""Rows of each sequence of a batch, read on the host: for the oracle and the torch backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from .spec import AttentionInputs, Cache


@dataclass(frozen=True, slots=True)
class Sequence:
    """Sequence `index` of the batch and its used rows of q and of k, v."""

    index: int
    q_rows: slice
    k_rows: slice

    def select(self, x: Tensor, rows: slice, varlen: bool) -> Tensor:
        """Return this sequence's view of a padded (batch, rows, ...) or packed (rows, ...) tensor: (rows, ...)."""
        return x[rows] if varlen else x[self.index, rows]

    def select_lse(self, lse: Tensor, varlen: bool) -> Tensor:
        """Return this sequence's view of (batch, heads, rows) or (heads, rows): (heads, rows)."""
        return lse[:, self.q_rows] if varlen else lse[self.index, :, self.q_rows]


def _rows(x: Tensor, batch: int, cu_seqlens: Tensor | None, seqused: Tensor | None) -> list[slice]:
    if cu_seqlens is None:
        starts, stops = [0] * batch, [x.shape[1]] * batch
    else:
        bounds = cu_seqlens.tolist()
        starts, stops = bounds[:-1], bounds[1:]
    if seqused is not None:
        stops = [start + used for start, used in zip(starts, seqused.tolist())]
    return [slice(start, stop) for start, stop in zip(starts, stops)]


def sequences(inputs: AttentionInputs, cache: Cache | None = None) -> Iterator[Sequence]:
    """Yield the sequences of a batch, dense or varlen, limited to seqused. Synchronises the device.

    With a cache, key rows are those that `cached_rows` takes.
    """
    q_rows = _rows(inputs.q, inputs.batch, inputs.cu_seqlens_q, inputs.seqused_q)
    if cache is None:
        k_rows = _rows(inputs.k, inputs.batch, inputs.cu_seqlens_k, inputs.seqused_k)
    else:
        k_rows = _cache_rows(inputs, cache)
    for index, (of_q, of_k) in enumerate(zip(q_rows, k_rows)):
        yield Sequence(index, of_q, of_k)


def _cache_rows(inputs: AttentionInputs, cache: Cache) -> list[slice]:
    capacity = cache.capacity(inputs.k)
    stops = [capacity] * inputs.batch if inputs.seqused_k is None else inputs.seqused_k.tolist()
    starts = [0] * inputs.batch if cache.leftpad is None else cache.leftpad.tolist()
    bounds = ((max(start, 0), min(stop, capacity)) for start, stop in zip(starts, stops))
    return [slice(start, max(start, stop)) for start, stop in bounds]


def cached_rows(x: Tensor, cache: Cache, sequence: int, rows: slice, heads: slice) -> Tensor:
    """Return rows of a sequence in a cache (k or v), (rows, heads, dim). Reads no other rows."""
    if cache.page_table is None:
        return x[sequence if cache.batch_idx is None else int(cache.batch_idx[sequence]), rows, heads]
    size = x.shape[1]
    first, stop = rows.start // size, -(-rows.stop // size)
    if rows.start == rows.stop:
        return x.new_empty(0, *x[0, 0, heads].shape)
    pages = x[:, :, heads][cache.page_table[sequence, first:stop].long()]
    return pages.flatten(0, 1)[rows.start - first * size : rows.stop - first * size]
