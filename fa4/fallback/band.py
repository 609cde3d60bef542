"""The mask of causal and windowed problems, a band of each sequence's scores."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..spec import AttentionSpec
from . import tiles
from .tiles import tiles_of


@dataclass(frozen=True, slots=True)
class Band:
    """The mask of one sequence: query i sees keys i + low ... i + high (None: open), aligned bottom-right."""

    low: int | None
    high: int | None
    seqlen_q: int
    seqlen_k: int

    @staticmethod
    def of(spec: AttentionSpec, seqlen_q: int, seqlen_k: int) -> Band:
        shift = seqlen_k - seqlen_q
        return Band(
            None if spec.window_left is None else shift - spec.window_left,
            None if spec.window_right is None else shift + spec.window_right,
            seqlen_q,
            seqlen_k,
        )

    def query_tiles(self) -> Iterator[range]:
        return tiles_of(range(self.seqlen_q), tiles.TILE_M)

    def key_tiles(self) -> Iterator[range]:
        return tiles_of(range(self.seqlen_k), tiles.TILE_N)

    def keys(self, q_rows: range) -> Iterator[range]:
        """Tiles of the keys that any of these queries sees."""
        first = 0 if self.low is None else max(0, q_rows[0] + self.low)
        stop = self.seqlen_k if self.high is None else min(self.seqlen_k, q_rows[-1] + self.high + 1)
        return tiles_of(range(first, max(first, stop)), tiles.TILE_N)

    def queries(self, k_rows: range) -> Iterator[range]:
        """Tiles of the queries that see any of these keys."""
        first = 0 if self.high is None else max(0, k_rows[0] - self.high)
        stop = self.seqlen_q if self.low is None else min(self.seqlen_q, k_rows[-1] - self.low + 1)
        return tiles_of(range(first, max(first, stop)), tiles.TILE_M)

    def hide(self, s: Tensor, q_rows: range, k_rows: range) -> None:
        """Set scores (..., queries, keys) of pairs that are masked to -inf."""
        hidden = self.hidden(q_rows, k_rows, s.device)
        if hidden is not None:
            s.masked_fill_(hidden, -torch.inf)

    def hidden(self, q_rows: range, k_rows: range, device: torch.device) -> Tensor | None:
        """Which pairs of the tile are masked, bool (queries, keys); None when none is."""
        bounds = []  # of key - query, those that cut this tile
        if self.low is not None and k_rows[0] - q_rows[-1] < self.low:
            bounds.append((torch.lt, self.low))
        if self.high is not None and k_rows[-1] - q_rows[0] > self.high:
            bounds.append((torch.gt, self.high))
        if not bounds:
            return None
        distance = torch.arange(k_rows.start, k_rows.stop, device=device)[None, :]
        distance = distance - torch.arange(q_rows.start, q_rows.stop, device=device)[:, None]
        return functools.reduce(torch.logical_or, (outside(distance, bound) for outside, bound in bounds))
