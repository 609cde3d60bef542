"""Calls of fa4's operators that a rank needs for its queries and the keys it has, for padded and packed parts.

A rank holds two chunks of each sequence, an early and a late one. A call takes the queries of one chunk or of both, and
the first few chunks of the available keys: those of one rank (2 chunks) or of all ranks (2 W). For padded parts it gets
views of these rows. For packed parts it gets all rows, and lengths that make the other rows padding.
"""

from __future__ import annotations

import abc
import enum
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.spec import AttentionInputs, Flags, Gradients, Saved, compute_dtype
from .group_rank import GroupRank, order


class Chunks(enum.Enum):
    """Chunks of this rank's queries in a call."""

    BOTH = enum.auto()
    EARLY = enum.auto()
    LATE = enum.auto()


_ALL = slice(None)


class ChunkCall(NamedTuple):
    """One call of the operators. queries, keys: slices of the rows, for padded parts. lengths: for packed parts, the
    fields of AttentionInputs from cu_seqlens_q on."""

    flags: Flags
    queries: slice = _ALL
    keys: slice = _ALL
    lengths: tuple = ()

    def rows(self, x: Tensor) -> Tensor:
        """Return the queries' rows of (batch, rows, heads, ...)."""
        return x if self.queries is _ALL else x[:, self.queries]

    def statistics(self, x: Tensor) -> Tensor:
        """Return the queries' rows of (batch, heads, rows)."""
        return x if self.queries is _ALL else x[:, :, self.queries]

    def keys_of(self, x: Tensor) -> Tensor:
        """Return the keys' rows of (batch, rows, heads, ...)."""
        return x if self.keys is _ALL else x[:, self.keys]

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> AttentionInputs:
        """Return the operators' arguments for the rows of this call."""
        q, k, v = self.rows(q), self.keys_of(k), self.keys_of(v)
        lengths = self.lengths or (None, None, None, None, q.shape[1], k.shape[1])
        return AttentionInputs(q, k, v, sink, *lengths)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return out and lse of this call's queries."""
        return torch.ops.fa4.forward(*self.inputs(q, k, v, sink), *self.flags)

    def backward(self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Gradients:
        """Return this call's contribution to the gradients of its rows. saved.lse is that of all keys."""
        dlse = None if saved.dlse is None else self.statistics(saved.dlse)
        saved = Saved(self.rows(saved.out), self.statistics(saved.lse), self.rows(saved.dout), dlse)
        grads = Gradients(*torch.ops.fa4.backward(*saved, *self.inputs(q, k, v, sink), *self.flags))
        dsink = grads.dsink
        return grads._replace(dsink=None if sink is None or dsink is None else dsink.to(compute_dtype(q.dtype)))


class Parts(abc.ABC):
    """Memory layout of the ranks' parts, and the calls that they need."""

    flags: Flags
    group_rank: GroupRank

    @abc.abstractmethod
    def call(self, queries: Chunks, chunks: int, total_chunks: int, flags: Flags) -> ChunkCall:
        """Return the call of the queries with the first `chunks` of the `total_chunks` chunks of available keys."""

    @abc.abstractmethod
    def join(self, early: Tensor, late: Tensor, axis: int) -> Tensor:
        """Join results of the calls of the early and the late chunk. axis: the axis of rows."""

    # Messages: the first axis of a message is one along which messages of ranks can be concatenated.

    def as_message(self, x: Tensor) -> Tensor:
        """Return this rank's rows in the layout of a message."""
        return x

    @abc.abstractmethod
    def whole(self, gathered: Tensor) -> Tensor:
        """Return all rows in sequence order, from the gathered messages of all ranks."""

    @abc.abstractmethod
    def by_rank(self, parts: list[Tensor]) -> Tensor:
        """Sum tensors of the first n rows of all (n may differ) in float32 or float64, as messages of all ranks."""

    def from_message(self, x: Tensor) -> Tensor:
        """Invert `as_message`."""
        return x

    @property
    def causal(self) -> bool:
        return self.flags.window_right is not None

    def own(self) -> list[ChunkCall]:
        """Return the calls for this rank's own keys: with a causal mask two, the longer one first."""
        if not self.causal:
            return [self.call(Chunks.BOTH, 2, 2, self.flags)]
        return [self.call(Chunks.LATE, 2, 2, self.flags), self.call(Chunks.EARLY, 1, 2, self.flags)]

    def own_at_once(self) -> ChunkCall:
        return self.call(Chunks.BOTH, 2, 2, self.flags)

    def with_keys_of(self, source: int) -> ChunkCall:
        """Return the call for this rank's queries and the keys of rank `source`."""
        if not self.causal:
            return self.own_at_once()
        flags = self.flags._replace(window_right=None)
        if source < self.group_rank.rank:  # its early chunk precedes both of ours, its late chunk follows both
            return self.call(Chunks.BOTH, 1, 2, flags)
        return self.call(Chunks.LATE, 2, 2, flags)  # both of its chunks lie between ours

    def with_all_keys(self) -> list[ChunkCall]:
        """Return the calls for this rank's queries and all keys in order. Causal: each chunk up to its last query."""
        rank, chunks = self.group_rank.rank, 2 * self.group_rank.world
        if not self.causal:
            return [self.call(Chunks.BOTH, chunks, chunks, self.flags)]
        return [
            self.call(Chunks.EARLY, rank + 1, chunks, self.flags),
            self.call(Chunks.LATE, chunks - rank, chunks, self.flags),
        ]


class PaddedParts(Parts):
    """(batch, rows, heads, head_dim)."""

    def __init__(self, rows: int, flags: Flags, group_rank: GroupRank) -> None:
        self.flags, self.group_rank, self._chunk = flags, group_rank, rows // 2

    def call(self, queries: Chunks, chunks: int, total_chunks: int, flags: Flags) -> ChunkCall:
        rows = {Chunks.BOTH: _ALL, Chunks.EARLY: slice(0, self._chunk), Chunks.LATE: slice(self._chunk, None)}
        return ChunkCall(flags, rows[queries], _ALL if chunks == total_chunks else slice(0, chunks * self._chunk))

    def join(self, early: Tensor, late: Tensor, axis: int) -> Tensor:
        return torch.cat((early, late), axis)

    def as_message(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (2, self._chunk)).transpose(0, 1)

    def whole(self, gathered: Tensor) -> Tensor:
        return torch.cat((*gathered[::2], *gathered[1::2].unbind()[::-1]), 1)

    def by_rank(self, parts: list[Tensor]) -> Tensor:
        world, (batch, _, *rest) = self.group_rank.world, parts[0].shape
        sums = parts[0].new_empty((2 * world, batch, self._chunk, *rest), dtype=compute_dtype(parts[0].dtype))
        for slot, i in enumerate(i for rank in range(world) for i in (rank, 2 * world - 1 - rank)):
            first = i * self._chunk
            terms, total = [x[:, first : first + self._chunk] for x in parts if x.shape[1] > first], sums[slot]
            if terms:
                total.copy_(terms[0])
            else:
                total.zero_()
            for x in terms[1:]:
                total.add_(x)
        return sums

    def from_message(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(1, 2)


class PackedParts(Parts):
    """(rows, heads, head_dim). cu_seqlens: of the whole sequences. max_part: an upper bound of a part's length."""

    def __init__(self, cu_seqlens: Tensor, rows: int, max_part: int, flags: Flags, group_rank: GroupRank) -> None:
        self.flags, self.group_rank, self._max, self._rows = flags, group_rank, max_part, rows
        self._whole, self._part = cu_seqlens, (cu_seqlens // group_rank.world).contiguous()
        self._half = self._part.diff() // 2

    def call(self, queries: Chunks, chunks: int, total_chunks: int, flags: Flags) -> ChunkCall:
        half, max_k = self._half, self._max * (total_chunks // 2)
        keys = self._part if total_chunks == 2 else self._whole
        used = None if chunks == total_chunks else chunks * half
        if queries is not Chunks.LATE:
            used_q = half if queries is Chunks.EARLY else None
            return ChunkCall(flags, lengths=(self._part, keys.contiguous(), used_q, used, self._max, max_k))
        # Cut each sequence in two: the early halves are padding rows, without keys.
        bounds = _split_each(self._part, self._part[:-1] + half)
        zeros = torch.zeros_like(half)
        used = None if used is None else _interleave(zeros, used)
        return ChunkCall(
            flags, lengths=(bounds, _split_each(keys, keys[:-1]), _interleave(zeros, half), used, self._max, max_k)
        )

    def join(self, early: Tensor, late: Tensor, axis: int) -> Tensor:
        """Join; each row is a padding row in one of the two results: 0 there, or -inf in lse."""
        return early + late if axis == 0 else torch.maximum(early, late)

    def whole(self, gathered: Tensor) -> Tensor:
        return gathered[self._order]

    def by_rank(self, parts: list[Tensor]) -> Tensor:
        total: Tensor = sum(parts[1:], parts[0].to(compute_dtype(parts[0].dtype)))
        return torch.empty_like(total).index_copy_(0, self._order.long(), total)

    @functools.cached_property
    def _order(self) -> Tensor:
        return order(self._whole, self.group_rank, self.group_rank.world * self._rows)


def _interleave(first: Tensor, second: Tensor) -> Tensor:
    """Return (2 * n,): the entries of both, alternating."""
    return torch.stack((first, second), 1).flatten().contiguous()


def _split_each(cu_seqlens: Tensor, middle: Tensor) -> Tensor:
    """Return the cu_seqlens of twice as many sequences: each is cut at `middle`."""
    return torch.cat((_interleave(cu_seqlens[:-1], middle), cu_seqlens[-1:])).contiguous()
