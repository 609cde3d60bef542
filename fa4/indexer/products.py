"""Scores by torch in tiles, for any device, and their gradients.

A tile is some rows of one sequence and some keys. The keys are a slice, the same for all rows, or an index tensor
(rows, keys) that names keys of each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import Problem, Sequence, parts

TILE_ROWS = 128
TILE_PRODUCTS = 1 << 24  # products of heads, rows and keys at once: 64 MiB of float32


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: of q. keys: of k, a slice or (rows, keys) int64. columns: of the scores, if keys are a slice. visible:
    (rows, keys) bool."""

    rows: slice
    keys: slice | Tensor
    columns: slice | None
    visible: Tensor


def tiles(problem: Problem, rows: slice, counts: Tensor) -> Iterator[tuple[Sequence, Tile]]:
    """Yield the tiles of all keys that these rows see. counts: of all rows, see `Problem.visible_counts`."""
    for sequence in problem.sequences():
        first, stop = max(sequence.rows.start, rows.start), min(sequence.rows.stop, rows.stop)
        for part in parts(first, stop, TILE_ROWS):
            heads = problem.q.shape[1]
            most = sequence.visible(part.stop - 1, problem.causal)
            width = max(TILE_PRODUCTS // (heads * (part.stop - part.start)), 1)
            for columns in parts(0, most, width):
                positions = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=counts.device)
                keys = slice(sequence.k_begin + columns.start, sequence.k_begin + columns.stop)
                yield sequence, Tile(part, keys, columns, positions < counts[part, None])


def products(q: Tensor, k: Tensor) -> Tensor:
    """Return q k^T, (rows, heads, keys). q: (rows, heads, dim). k: (keys, dim), or (rows, keys, dim)."""
    if k.ndim == 2:
        return (q.flatten(0, 1) @ k.T).unflatten(0, q.shape[:2])
    return q @ k.mT


def weighted(z: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over heads of weights * relu(z), (rows, keys). z: (rows, heads, keys). weights: (rows, heads)."""
    return (weights.unsqueeze(1) @ z.relu()).squeeze(1)


def scores(problem: Problem, rows: slice, counts: Tensor, out: Tensor) -> None:
    """Write the scores of some rows into out, (rows, columns), except for tiles of which no row sees a key; -inf for
    the other keys that a row does not see."""
    for sequence, tile in tiles(problem, rows, counts):
        assert tile.columns is not None
        k = problem.keys_of(problem.k, sequence, tile.columns).to(out.dtype)
        tile_scores = weighted(products(problem.q[tile.rows].to(out.dtype), k), problem.weights[tile.rows])
        if problem.k_descale is not None:
            tile_scores = tile_scores * problem.keys_of(problem.k_descale, sequence, tile.columns)
        target = out[tile.rows.start - rows.start : tile.rows.stop - rows.start, tile.columns]
        target.copy_(tile_scores.masked_fill(~tile.visible, -torch.inf))


@dataclass(frozen=True, slots=True)
class Gradients:
    """Sums of gradients in the compute dtype, shaped like the tensors of a problem."""

    q: Tensor
    k: Tensor
    weights: Tensor

    @staticmethod
    def zeros(problem: Problem) -> Gradients:
        dtype = problem.score_dtype
        return Gradients(*(torch.zeros_like(x, dtype=dtype) for x in (problem.q, problem.k, problem.weights)))

    def add(self, tile: Tile, d_scores: Tensor, q: Tensor, k: Tensor, z: Tensor, weights: Tensor) -> None:
        """Add a tile's part. d_scores: (rows, keys), 0 for keys that are not visible. q, k, weights: of the tile, in
        the compute dtype. z: their products."""
        self.weights[tile.rows] += (z.relu() @ d_scores.unsqueeze(-1)).squeeze(-1)
        dz = d_scores.unsqueeze(1) * weights.unsqueeze(-1) * (z > 0)
        if isinstance(tile.keys, slice):
            flat = dz.flatten(0, 1)
            self.q[tile.rows] += (flat @ k).unflatten(0, q.shape[:2])
            self.k[tile.keys] += flat.T @ q.flatten(0, 1)
        else:
            self.q[tile.rows] += dz @ k
            # With accumulate, torch adds in a fixed order on every device; index_add_ does not.
            self.k.index_put_((tile.keys,), dz.mT @ q, accumulate=True)
