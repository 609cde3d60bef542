"""The tensors of a call in one form: rows of all sequences in a row, and the keys that each row sees.

Let t be a row (a query), s a key and h a head:

    scores[t, s] = k_descale[s] * sum over h of weights[t, h] * relu(q[t, h] . k[s])

The keys that a row sees are the first ones of its sequence: with `causal`, as many as the bottom-right alignment
allows. So a row needs only their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.spec import compute_dtype


class Bounds(NamedTuple):
    """Where sequences begin and end; int32 on the device of q.

    q_begin: (batch + 1,), the first row of each sequence. k_begin: (batch,), the first key row; zeros for pages.
    k_count: (batch,), keys in use.
    """

    q_begin: Tensor
    k_begin: Tensor
    k_count: Tensor


@dataclass(frozen=True, slots=True)
class Problem:
    """Tensors and lengths of a call, checked.

    q: (rows, heads, head_dim). k: (key rows, head_dim), or pages (pages, page_size, head_dim). weights: (rows, heads)
    in the compute dtype, times the scale of q. k_descale: shape of k without its last axis, float32, or None. columns:
    of the scores; no sequence has more keys.
    """

    q: Tensor
    k: Tensor
    weights: Tensor
    k_descale: Tensor | None
    bounds: Bounds
    page_table: Tensor | None
    columns: int
    causal: bool

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def score_dtype(self) -> torch.dtype:
        return compute_dtype(self.q.dtype)

    def sequence_of_rows(self) -> Tensor:
        """Return the index of each row's sequence, (rows,) int32; the batch size for rows after the last sequence."""
        rows = torch.arange(self.rows, dtype=torch.int32, device=self.q.device)
        return torch.searchsorted(self.bounds.q_begin[1:].contiguous(), rows, right=True, out_int32=True)

    def visible_counts(self) -> Tensor:
        """Return the number of keys that each row sees, (rows,) int32."""
        begin, _, k_count = self.bounds
        sequence = self.sequence_of_rows()
        counts = torch.cat((k_count, k_count.new_zeros(1)))[sequence.long()]
        if self.causal:
            ends = torch.cat((begin[1:], begin[-1:]))[sequence.long()]
            rows = torch.arange(self.rows, dtype=torch.int32, device=self.q.device)
            counts = (counts - (ends - 1 - rows)).clamp(min=0).minimum(counts)
        return counts

    def sequences(self) -> list[Sequence]:
        """Return the sequences, read on the host."""
        q_begin, k_begin, k_count = (x.tolist() for x in self.bounds)
        return [
            Sequence(index, slice(q_begin[index], q_begin[index + 1]), k_begin[index], k_count[index])
            for index in range(len(k_begin))
        ]

    def keys_of(self, x: Tensor, sequence: Sequence, part: slice) -> Tensor:
        """Return keys `part` of a sequence, of a tensor x with the axes of k. Reads no other rows."""
        if self.page_table is None:
            return x[sequence.k_begin + part.start : sequence.k_begin + part.stop]
        size = x.shape[1]
        first, stop = part.start // size, -(-part.stop // size)
        pages = x[self.page_table[sequence.index, first:stop].long()].flatten(0, 1)
        return pages[part.start - first * size : part.stop - first * size]


@dataclass(frozen=True, slots=True)
class Sequence:
    """Sequence `index` of the batch: its rows, its first key row and its number of keys."""

    index: int
    rows: slice
    k_begin: int
    k_count: int

    def visible(self, row: int, causal: bool) -> int:
        """Return how many keys a row sees."""
        return min(max(self.k_count - (self.rows.stop - 1 - row), 0), self.k_count) if causal else self.k_count


def parts(start: int, stop: int, size: int) -> Iterator[slice]:
    """Yield slices of at most `size` from start to stop."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
