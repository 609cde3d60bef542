"""Band mask of causal and sliding-window problems, for one sequence."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime.spec import AttentionSpec
from . import tiles
from .tiles import tiles_of


@dataclass(frozen=True, slots=True)
class Band:
    """Band mask: query i attends to keys i + low ... i + high (None: unbounded); bottom-right aligned."""

    low: int | None
    high: int | None
    seqlen_q: int
    seqlen_k: int

    @staticmethod
    def of(spec: AttentionSpec, seqlen_q: int, seqlen_k: int) -> Band:
        shift = seqlen_k - seqlen_q
        low = None if spec.window_left is None else shift - spec.window_left
        high = None if spec.window_right is None else shift + spec.window_right
        return Band(low, high, seqlen_q, seqlen_k)

    def query_tiles(self) -> Iterator[range]:
        return tiles_of(range(self.seqlen_q), tiles.TILE_M)

    def key_tiles(self) -> Iterator[range]:
        return tiles_of(range(self.seqlen_k), tiles.TILE_N)

    def keys(self, q_rows: range) -> Iterator[range]:
        """Tiles of the keys that are visible to any of these queries."""
        first = 0 if self.low is None else max(0, q_rows[0] + self.low)
        stop = self.seqlen_k if self.high is None else min(self.seqlen_k, q_rows[-1] + self.high + 1)
        return tiles_of(range(first, max(first, stop)), tiles.TILE_N)

    def queries(self, k_rows: range) -> Iterator[range]:
        """Tiles of the queries that attend to any of these keys."""
        first = 0 if self.high is None else max(0, k_rows[0] - self.high)
        stop = self.seqlen_q if self.low is None else min(self.seqlen_q, k_rows[-1] - self.low + 1)
        return tiles_of(range(first, max(first, stop)), tiles.TILE_M)

    def apply_mask(self, s: Tensor, q_rows: range, k_rows: range) -> None:
        """Set masked scores to -inf, in place; s: (..., queries, keys)."""
        masked = self.masked(q_rows, k_rows, s.device)
        if masked is not None:
            s.masked_fill_(masked, -torch.inf)

    def masked(self, q_rows: range, k_rows: range, device: torch.device) -> Tensor | None:
        """Mask of the tile, bool (queries, keys), True for masked pairs; None if no pair is masked."""
        bounds = []  # bounds of key - query that exclude pairs of this tile
        if self.low is not None and k_rows[0] - q_rows[-1] < self.low:
            bounds.append((torch.lt, self.low))
        if self.high is not None and k_rows[-1] - q_rows[0] > self.high:
            bounds.append((torch.gt, self.high))
        if not bounds:
            return None
        distance = torch.arange(k_rows.start, k_rows.stop, device=device)[None, :]
        distance = distance - torch.arange(q_rows.start, q_rows.stop, device=device)[:, None]
        return functools.reduce(torch.logical_or, (outside(distance, bound) for outside, bound in bounds))
