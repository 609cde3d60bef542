"""Execution: which code computes scores and which selects, and both on chunks of rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..torch_ops.run import prepare
from . import backends, products, selection
from .problem import Problem, parts
from .products import Gradients

CHUNK_BYTES = 1 << 28  # of scores that exist at once in a top-k
ROW_MULTIPLE = 4  # columns in memory: rows of float32 start at multiples of 16 bytes


class Scores(torch.autograd.Function):
    """Scores of all rows; differentiable in q, k and weights, which are its first arguments."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, weights: Tensor, problem: Problem) -> Tensor:
        ctx.save_for_backward(q, k, weights)
        ctx.problem = problem
        out = unseen_scores(problem)
        products.scores(problem, slice(0, problem.rows), problem.visible_counts(), out)
        return out

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


def unseen_scores(problem: Problem) -> Tensor:
    """Return scores of rows that see no key."""
    return problem.weights.new_full((problem.rows, problem.columns), -torch.inf)


def scores(problem: Problem, backend: str, needs_gradients: bool) -> Tensor:
    """Return the scores of all rows, (rows, columns)."""
    counts = problem.visible_counts()
    kernel = backends.scores(problem, backend, counts, needs_gradients)
    if kernel is None:
        return Scores.apply(problem.q, problem.k, problem.weights, problem)
    out = unseen_scores(problem)
    with prepare.on_device(out.device):
        kernel(out, slice(0, problem.rows))
    return out


def topk(problem: Problem, count: int, returns_scores: bool, backend: str) -> tuple[Tensor, Tensor | None]:
    """Return the chosen indices, (rows, count) int32, and their scores. No more than CHUNK_BYTES of scores exist at
    once, but always those of one row."""
    counts = problem.visible_counts()
    compute = backends.scores_of_topk(problem, backend, counts)
    select = backends.selection(problem, count, backend)
    indices = counts.new_empty(problem.rows, count)
    values = problem.weights.new_empty(problem.rows, count) if returns_scores else None
    width = -(-problem.columns // ROW_MULTIPLE) * ROW_MULTIPLE
    height = max(CHUNK_BYTES // (problem.score_dtype.itemsize * max(width, 1)), 1)
    with prepare.on_device(indices.device):
        for rows in parts(0, problem.rows, height):
            # Scores that a row does not see are not set, and nothing reads them.
            part = problem.weights.new_empty(rows.stop - rows.start, width)[:, : problem.columns]
            compute(part, rows)
            select(part, counts[rows], indices[rows])
            if values is not None:
                values[rows] = selection.gather(part, indices[rows])
    return indices, values
