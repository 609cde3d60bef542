"""Execution: which code computes scores and which selects, and both on chunks of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import backends, products, selection
from .problem import Problem, parts
from .products import Gradients

CHUNK_BYTES = 1 << 28  # of scores that exist at once in a top-k


class Scores(torch.autograd.Function):
    """Scores of all rows; differentiable in q, k and weights, which are its first arguments."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, weights: Tensor, problem: Problem) -> Tensor:
        ctx.save_for_backward(q, k, weights)
        ctx.problem = problem
        return products.scores(problem, slice(0, problem.rows), problem.visible_counts())

    @staticmethod
    @once_differentiable
    def backward(ctx, d_scores: Tensor) -> tuple:
        problem: Problem = ctx.problem
        grads = Gradients.zeros(problem)
        dtype = problem.score_dtype
        for _, tile in products.tiles(problem, slice(0, problem.rows), problem.visible_counts()):
            q, k, weights = problem.q[tile.rows].to(dtype), problem.k[tile.keys].to(dtype), problem.weights[tile.rows]
            d_tile = d_scores[tile.rows, tile.columns].masked_fill(~tile.visible, 0.0)
            grads.add(tile, d_tile, q, k, products.products(q, k), weights)
        q, k, weights = ctx.saved_tensors
        return grads.q.to(q.dtype), grads.k.to(k.dtype), grads.weights.to(weights.dtype), None


def scores(problem: Problem, backend: str, needs_gradients: bool) -> Tensor:
    """Return the scores of all rows, (rows, columns)."""
    counts = problem.visible_counts()
    kernel = backends.scores(problem, backend, counts, needs_gradients)
    if kernel is None:
        return Scores.apply(problem.q, problem.k, problem.weights, problem)
    out = problem.weights.new_full((problem.rows, problem.columns), -torch.inf)
    with backends.on_device(out):
        kernel(out, slice(0, problem.rows))
    return out


def topk(problem: Problem, count: int, returns_scores: bool, backend: str) -> tuple[Tensor, Tensor | None]:
    """Return the chosen indices, (rows, count) int32, and their scores. No more than CHUNK_BYTES of scores exist at
    once, but always those of one row."""
    counts = problem.visible_counts()
    kernel = backends.scores(problem, backend, counts, False)
    indices = counts.new_empty(problem.rows, count)
    values = problem.weights.new_empty(problem.rows, count) if returns_scores else None
    height = max(CHUNK_BYTES // (problem.score_dtype.itemsize * max(problem.columns, 1)), 1)
    for rows in parts(0, problem.rows, height):
        if kernel is None:
            part = products.scores(problem, rows, counts)
        else:
            part = problem.weights.new_full((rows.stop - rows.start, problem.columns), -torch.inf)
            with backends.on_device(part):
                kernel(part, rows)
        indices[rows] = selection.select(part, counts[rows], count)
        if values is not None:
            values[rows] = selection.gather(part, indices[rows])
    return indices, values
