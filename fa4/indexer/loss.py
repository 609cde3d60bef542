"""Training loss of the indexer: KL divergence from the attention's own distribution, recomputed in tiles.

Let t be a row, s one of its keys, and g a head of the attention:

    a[t, s] = sum over g of exp(softmax_scale * attn_q[t, g] . attn_k[s, g] - attn_lse[t, g])
    p[t, s] = a[t, s] / sum over s of a[t, s]
    loss[t] = sum over s of p[t, s] * (log p[t, s] - log softmax(scores[t])[s])

The gradient of the scores is softmax(scores[t]) - p[t]. Both directions visit the keys once; what they keep has one
number for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import products
from .problem import Problem, parts
from .products import Gradients, Tile

GATHERED = 1 << 24  # elements of gathered keys at once


@dataclass(frozen=True, slots=True)
class Target:
    """Attention whose distribution the indexer learns. q: (rows, heads, dim). k: (key rows, heads of k, dim). lse:
    (rows, heads). indices: keys of each row, (rows, topk) int32, negative for none; None for all visible keys."""

    q: Tensor
    k: Tensor
    lse: Tensor
    softmax_scale: float
    indices: Tensor | None

    def mass(self, tile: Tile, dtype: torch.dtype) -> Tensor:
        """Return a of a tile, (rows, keys); 0 for keys that are not visible."""
        total = None
        q, k, lse = self.q[tile.rows].to(dtype), self.k[tile.keys], self.lse[tile.rows].to(dtype)
        group = q.shape[1] // k.shape[-2]
        for head in range(k.shape[-2]):
            heads = slice(head * group, (head + 1) * group)
            logits = products.products(q[:, heads], k[..., head, :].to(dtype)) * self.softmax_scale
            part = (logits - lse[:, heads, None]).exp().sum(1)
            total = part if total is None else total + part
        assert total is not None
        return total.masked_fill(~tile.visible, 0.0)


class Sums(NamedTuple):
    """Numbers of each row, (rows,): the largest score, the sum of exp(score - largest), and the sum of a. The
    log-sum-exp in one number would round the weights of large scores."""

    largest: Tensor
    exponentials: Tensor
    mass: Tensor

    def add(self, tile: Tile, scores: Tensor, a: Tensor) -> None:
        """Add a tile. scores: -inf for keys that are not visible."""
        rows = tile.rows
        largest = self.largest[rows].maximum(scores.amax(-1))
        shift = largest.masked_fill(largest == -torch.inf, 0.0)  # a row without keys
        exponentials = self.exponentials[rows] * (self.largest[rows] - shift).exp()
        self.exponentials[rows] = exponentials + (scores - shift[:, None]).exp().sum(-1)
        self.largest[rows] = largest
        self.mass[rows] += a.sum(-1)

    def softmax(self, tile: Tile, scores: Tensor) -> Tensor:
        """Return the softmax of a tile's scores."""
        largest, exponentials = self.largest[tile.rows, None], self.exponentials[tile.rows, None]
        return (scores - largest - exponentials.log()).exp()


def tiles(problem: Problem, target: Target, counts: Tensor) -> Iterator[Tile]:
    """Yield the tiles of all rows: of all visible keys, or of those that the indices name."""
    if target.indices is None:
        for _, tile in products.tiles(problem, slice(0, problem.rows), counts):
            yield tile
        return
    topk = target.indices.shape[1]
    columns = problem.k.shape[-1] + target.k.shape[-1] * target.k.shape[-2]
    for sequence in problem.sequences():
        if not topk or not sequence.k_count:
            continue
        for rows in parts(sequence.rows.start, sequence.rows.stop, max(GATHERED // (topk * columns), 1)):
            indices = target.indices[rows]
            visible = (indices >= 0) & (indices < counts[rows, None])
            keys = indices.masked_fill(~visible, 0).long() + sequence.k_begin
            yield Tile(rows, keys, None, visible)


def operands(problem: Problem, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k and weights of a tile, and the products of q and k, in the compute dtype."""
    dtype = problem.score_dtype
    q, k, weights = problem.q[tile.rows].to(dtype), problem.k[tile.keys].to(dtype), problem.weights[tile.rows]
    return q, k, weights, products.products(q, k)


def forward(problem: Problem, target: Target) -> tuple[Tensor, Sums]:
    """Return the loss of each row, 0 where a row has no key, and the sums for the backward."""
    zeros = problem.weights.new_zeros(problem.rows)
    sums = Sums(torch.full_like(zeros, -torch.inf), zeros.clone(), zeros.clone())
    negative_entropy, cross = zeros.clone(), zeros.clone()
    for tile in tiles(problem, target, problem.visible_counts()):
        _, _, weights, z = operands(problem, tile)
        scores = products.weighted(z, weights)
        a = target.mass(tile, scores.dtype)
        sums.add(tile, scores.masked_fill(~tile.visible, -torch.inf), a)
        negative_entropy[tile.rows] += torch.special.xlogy(a, a).sum(-1)
        cross[tile.rows] += (a * scores.masked_fill(~tile.visible, 0.0)).sum(-1)
    loss = (negative_entropy - cross) / sums.mass - sums.mass.log() + sums.largest + sums.exponentials.log()
    return torch.where(sums.mass > 0, loss, zeros), sums


def backward(problem: Problem, target: Target, sums: Sums, d_loss: Tensor) -> Gradients:
    """Return the gradients of q, k and weights. d_loss: (rows,)."""
    grads = Gradients.zeros(problem)
    factor = torch.where(sums.mass > 0, d_loss, torch.zeros_like(d_loss))
    mass = torch.where(sums.mass > 0, sums.mass, torch.ones_like(sums.mass))
    for tile in tiles(problem, target, problem.visible_counts()):
        q, k, weights, z = operands(problem, tile)
        scores = products.weighted(z, weights)
        p = target.mass(tile, scores.dtype) / mass[tile.rows, None]
        d_scores = factor[tile.rows, None] * (sums.softmax(tile, scores) - p)
        grads.add(tile, d_scores.masked_fill(~tile.visible, 0.0), q, k, z, weights)
    return grads


def of_rows(problem: Problem, target: Target) -> tuple[Tensor, Tensor]:
    """Return the loss of each row, and which rows have one: those with a key. Differentiable."""
    loss, mass = RowLoss.apply(problem.q, problem.k, problem.weights, problem, target)
    return loss, mass > 0


class RowLoss(torch.autograd.Function):
    """Loss of each row of a problem, differentiable in q, k and weights, which are its first arguments; and the sum of
    a of each row."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, weights: Tensor, problem: Problem, target: Target) -> tuple[Tensor, Tensor]:
        loss, sums = forward(problem, target)
        ctx.save_for_backward(q, k, weights, *sums)
        ctx.mark_non_differentiable(sums.mass)
        ctx.problem, ctx.target = problem, target
        return loss, sums.mass

    @staticmethod
    @once_differentiable
    def backward(ctx, d_loss: Tensor, _: Tensor) -> tuple:
        q, k, weights, *sums = ctx.saved_tensors
        grads = backward(ctx.problem, ctx.target, Sums(*sums), d_loss)
        return grads.q.to(q.dtype), grads.k.to(k.dtype), grads.weights.to(weights.dtype), None, None
