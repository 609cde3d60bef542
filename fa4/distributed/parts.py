"""Which queries at hand see which keys at hand, as calls of fa4's operators, for padded and for packed parts.

A rank holds two chunks of each sequence, an early and a late one. A call is of both or of one of them, with the first
few chunks of the keys at hand: those of one rank (2 chunks) or of all (2 W). Of padded parts it gets views of these
rows; of packed ones all rows, and lengths that leave the others idle.
"""

from __future__ import annotations

import abc
import enum
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import AttentionInputs, Flags, Gradients, Saved
from .group_rank import GroupRank, order


class Chunks(enum.Enum):
    """Of this rank's queries."""

    BOTH = enum.auto()
    EARLY = enum.auto()
    LATE = enum.auto()


_ALL = slice(None)


def accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Call(NamedTuple):
    """One call of the operators. queries, keys: the rows that it gets, along the axis of rows, which only padded
    parts have cut. lengths: of packed parts, from cu_seqlens_q on."""

    flags: Flags
    queries: slice = _ALL
    keys: slice = _ALL
    lengths: tuple = ()

    def rows(self, x: Tensor) -> Tensor:
        """The queries' rows of (batch, rows, heads, ...)."""
        return x if self.queries is _ALL else x[:, self.queries]

    def statistics(self, x: Tensor) -> Tensor:
        """The queries' rows of (batch, heads, rows)."""
        return x if self.queries is _ALL else x[:, :, self.queries]

    def keys_of(self, x: Tensor) -> Tensor:
        """The keys' rows of (batch, rows, heads, ...)."""
        return x if self.keys is _ALL else x[:, self.keys]

    def inputs(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> AttentionInputs:
        """The operators' arguments of the rows that it gets."""
        q, k, v = self.rows(q), self.keys_of(k), self.keys_of(v)
        lengths = self.lengths or (None, None, None, None, q.shape[1], k.shape[1])
        return AttentionInputs(q, k, v, sink, *lengths)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """out and lse of the queries that it gets."""
        return torch.ops.fa4.forward(*self.inputs(q, k, v, sink), *self.flags)

    def backward(self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Gradients:
        """Of the rows that it gets, what these pairs add, through the lse of all keys."""
        dlse = None if saved.dlse is None else self.statistics(saved.dlse)
        saved = Saved(self.rows(saved.out), self.statistics(saved.lse), self.rows(saved.dout), dlse)
        grads = Gradients(*torch.ops.fa4.backward(*saved, *self.inputs(q, k, v, sink), *self.flags))
        dsink = grads.dsink
        return grads._replace(dsink=None if sink is None or dsink is None else dsink.to(accumulator(q)))


class Parts(abc.ABC):
    """How parts of ranks lie in memory, and the calls that they need."""

    flags: Flags
    place: GroupRank

    @abc.abstractmethod
    def call(self, queries: Chunks, chunks: int, of: int, flags: Flags) -> Call:
        """Queries with the first `chunks` of the `of` chunks of keys at hand."""

    @abc.abstractmethod
    def join(self, early: Tensor, late: Tensor, axis: int) -> Tensor:
        """What calls of either chunk gave, of whose axes `axis` is that of rows."""

    # A part as it travels has an axis in front that ranks, or their chunks, can be put along.

    @abc.abstractmethod
    def sent(self, x: Tensor) -> Tensor:
        """This rank's rows, as every rank is to get them."""

    @abc.abstractmethod
    def whole(self, gathered: Tensor) -> Tensor:
        """All rows in their order, of what all ranks sent."""

    @abc.abstractmethod
    def by_rank(self, parts: list[Tensor]) -> Tensor:
        """The sum, in float32 or float64, of tensors of the first so many rows of all, as all ranks would send it."""

    @abc.abstractmethod
    def received(self, x: Tensor) -> Tensor:
        """The inverse of `sent`."""

    @property
    def causal(self) -> bool:
        return self.flags.window_right is not None

    def own(self) -> list[Call]:
        """The pairs of this rank's own keys, for a causal mask in two calls, the longer one first."""
        if not self.causal:
            return [self.call(Chunks.BOTH, 2, 2, self.flags)]
        return [self.call(Chunks.LATE, 2, 2, self.flags), self.call(Chunks.EARLY, 1, 2, self.flags)]

    def own_at_once(self) -> Call:
        return self.call(Chunks.BOTH, 2, 2, self.flags)

    def with_keys_of(self, source: int) -> Call:
        """The pairs of this rank's queries and another one's keys."""
        if not self.causal:
            return self.own_at_once()
        flags = self.flags._replace(window_right=None)
        if source < self.place.rank:  # its early chunk lies before both of ours, its late one behind both
            return self.call(Chunks.BOTH, 1, 2, flags)
        return self.call(Chunks.LATE, 2, 2, flags)  # both of its chunks lie between ours

    def with_all_keys(self) -> list[Call]:
        """This rank's queries with the keys of all ranks in their order: each chunk's up to its last query."""
        rank, chunks = self.place.rank, 2 * self.place.world
        if not self.causal:
            return [self.call(Chunks.BOTH, chunks, chunks, self.flags)]
        return [
            self.call(Chunks.EARLY, rank + 1, chunks, self.flags),
            self.call(Chunks.LATE, chunks - rank, chunks, self.flags),
        ]


class Padded(Parts):
    """(batch, rows, heads, head_dim)."""

    def __init__(self, rows: int, flags: Flags, place: GroupRank) -> None:
        self.flags, self.place, self._chunk = flags, place, rows // 2

    def call(self, queries: Chunks, chunks: int, of: int, flags: Flags) -> Call:
        rows = {
            Chunks.BOTH: _ALL,
            Chunks.EARLY: slice(0, self._chunk),
            Chunks.LATE: slice(self._chunk, None),
        }
        return Call(flags, rows[queries], _ALL if chunks == of else slice(0, chunks * self._chunk))

    def join(self, early: Tensor, late: Tensor, axis: int) -> Tensor:
        return torch.cat((early, late), axis)

    def sent(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (2, self._chunk)).transpose(0, 1)

    def whole(self, gathered: Tensor) -> Tensor:
        return torch.cat((*gathered[::2], *gathered[1::2].unbind()[::-1]), 1)

    def by_rank(self, parts: list[Tensor]) -> Tensor:
        world, (batch, _, *rest) = self.place.world, parts[0].shape
        sums = parts[0].new_empty((2 * world, batch, self._chunk, *rest), dtype=accumulator(parts[0]))
        for place, i in enumerate(i for rank in range(world) for i in (rank, 2 * world - 1 - rank)):
            first = i * self._chunk
            those, total = [x[:, first : first + self._chunk] for x in parts if x.shape[1] > first], sums[place]
            if those:
                total.copy_(those[0])
            else:
                total.zero_()
            for x in those[1:]:
                total.add_(x)
        return sums

    def received(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(1, 2)


class Packed(Parts):
    """(rows, heads, head_dim). cu_seqlens: of the whole sequences; max_part: an upper bound of a part's length."""

    def __init__(self, cu_seqlens: Tensor, rows: int, max_part: int, flags: Flags, place: GroupRank) -> None:
        self.flags, self.place, self._max, self._rows = flags, place, max_part, rows
        self._whole, self._part = cu_seqlens, (cu_seqlens // place.world).contiguous()
        self._half = self._part.diff() // 2

    def call(self, queries: Chunks, chunks: int, of: int, flags: Flags) -> Call:
        half, most_k = self._half, self._max * (of // 2)
        keys = self._part if of == 2 else self._whole
        used = None if chunks == of else chunks * half
        if queries is not Chunks.LATE:
            used_q = half if queries is Chunks.EARLY else None
            return Call(flags, lengths=(self._part, keys.contiguous(), used_q, used, self._max, most_k))
        # Sequences in two: the early halves are idle, and see no key.
        bounds = _halves(self._part, self._part[:-1] + half)
        none = torch.zeros_like(half)
        used = None if used is None else _twice(none, used)
        return Call(flags, lengths=(bounds, _halves(keys, keys[:-1]), _twice(none, half), used, self._max, most_k))

    def join(self, early: Tensor, late: Tensor, axis: int) -> Tensor:
        """Each row is idle in one of them: 0 there, or -inf in a lse."""
        return early + late if axis == 0 else torch.maximum(early, late)

    def sent(self, x: Tensor) -> Tensor:
        return x

    def whole(self, gathered: Tensor) -> Tensor:
        return gathered[self._order]

    def by_rank(self, parts: list[Tensor]) -> Tensor:
        total: Tensor = sum(parts[1:], parts[0].to(accumulator(parts[0])))
        return torch.empty_like(total).index_copy_(0, self._order.long(), total)

    def received(self, x: Tensor) -> Tensor:
        return x

    @functools.cached_property
    def _order(self) -> Tensor:
        return order(self._whole, self.place, self.place.world * self._rows)


def _twice(first: Tensor, second: Tensor) -> Tensor:
    """(2 * n,): the entries of both in turns."""
    return torch.stack((first, second), 1).flatten().contiguous()


def _halves(cu_seqlens: Tensor, middle: Tensor) -> Tensor:
    """Bounds of twice as many sequences: each is cut at `middle`."""
    return torch.cat((_twice(cu_seqlens[:-1], middle), cu_seqlens[-1:])).contiguous()
