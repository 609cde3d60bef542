"""Scores of the lightning indexer, its top-k and its loss by formula, row by row in float64; random problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """queries, keys: of each sequence. form: "padded" (equal lengths), "packed", or "pages" of `page_size` rows.
    integers: small ones, whose scores are exact and often equal."""

    name: str
    queries: tuple[int, ...] = (5, 5)
    keys: tuple[int, ...] = (9, 9)
    heads: int = 4
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    form: str = "padded"
    causal: bool = False
    page_size: int = 4
    scales: bool = False
    used: tuple[int, ...] | None = None
    integers: bool = False
    packed_pages: bool = False


@dataclass(frozen=True)
class Problem:
    """A call, and for each of its rows the sequence's keys. rows: of the flat q; (sequence, keys that the row sees)."""

    case: Case
    q: Tensor
    k: Tensor
    weights: Tensor
    options: dict[str, Any]
    keys: list[Tensor]
    key_scales: list[Tensor]
    rows: list[tuple[int, int]]
    columns: int
    positions: list[Tensor] = field(default_factory=list)

    def flat(self, x: Tensor) -> Tensor:
        """Return a tensor of the queries with its rows in one axis."""
        return x if "cu_seqlens_q" in self.options else x.flatten(0, 1)


def _bounds(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).int()


def make(case: Case, seed: int, device: str = "cpu") -> Problem:
    """Draw a problem. Rows and pages that no sequence uses hold NaN."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if case.integers:
            return torch.randint(-1, 2, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    used = case.used or case.keys
    rows_q, rows_k = sum(case.queries), sum(case.keys)
    q, weights = draw(rows_q, case.heads, case.head_dim), draw(rows_q, case.heads)
    k, k_scale = draw(rows_k, case.head_dim), torch.rand(rows_k, generator=generator) + 0.5
    options: dict[str, Any] = dict(causal=case.causal)
    if case.scales:
        options |= dict(q_descale=torch.rand(rows_q, case.heads, generator=generator) + 0.5, k_descale=k_scale)
    else:
        k_scale = torch.ones(rows_k)
    begin_q, begin_k = _bounds(case.queries), _bounds(case.keys)
    positions = [torch.arange(int(begin_k[i]), int(begin_k[i]) + n) for i, n in enumerate(used)]
    columns = max(case.keys)
    if case.form == "pages":
        size = case.page_size
        counts = [-(-n // size) for n in case.keys]
        order = torch.randperm(sum(counts) + 2, generator=generator)
        table, where = torch.full((len(used), max(counts)), -1, dtype=torch.int32), 0
        pages, scales = (
            torch.full((len(order), size, case.head_dim), torch.nan),
            torch.full((len(order), size), torch.nan),
        )
        flat, flat_scales, places = pages.flatten(0, 1), scales.flatten(), []
        for i, n in enumerate(used):
            mine = order[where : where + counts[i]]
            table[i, : counts[i]], where = mine.int(), where + counts[i]
            place = (mine[:, None] * size + torch.arange(size)).flatten()[:n]
            flat[place], flat_scales[place] = k[positions[i]], k_scale[positions[i]]
            places.append(place)
        k, k_scale, positions, columns = pages, scales, places, max(counts) * size
        options |= dict(page_table=table)
        if case.scales:
            options |= dict(k_descale=scales)
    if case.used is not None or case.form == "pages":
        options |= dict(seqused_k=torch.tensor(used, dtype=torch.int32))
        if case.form != "pages":
            is_used = torch.zeros(rows_k, dtype=torch.bool)
            for x in positions:
                is_used[x] = True
            k[~is_used] = torch.nan
    q, k = q.to(case.dtype), k.to(case.dtype)
    flat_k, flat_scales = (k.flatten(0, 1), k_scale.flatten()) if case.form == "pages" else (k, k_scale)
    keys, key_scales = [flat_k[x] for x in positions], [flat_scales[x] for x in positions]
    rows = [
        (i, min(max(used[i] - (n - 1 - t), 0), used[i]) if case.causal else used[i])
        for i, n in enumerate(case.queries)
        for t in range(n)
    ]
    if case.form == "packed":
        options |= dict(cu_seqlens_q=begin_q, cu_seqlens_k=begin_k)
        options |= dict(max_seqlen_q=max(case.queries), max_seqlen_k=columns)
    elif case.packed_pages:
        options |= dict(cu_seqlens_q=begin_q)
    else:
        shape = len(case.queries), case.queries[0]
        q, weights = q.unflatten(0, shape), weights.unflatten(0, shape)
        if case.scales:
            options["q_descale"] = options["q_descale"].unflatten(0, shape)
        if case.form == "padded":
            k = k.unflatten(0, (len(case.keys), case.keys[0]))
            if case.scales:
                options["k_descale"] = options["k_descale"].unflatten(0, (len(case.keys), case.keys[0]))
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
    tensors = [x.to(device) for x in (q, k, weights)]
    q, k, weights = tensors
    on_device = ([x.to(device) for x in keys], [x.to(device) for x in key_scales])
    return Problem(case, q, k, weights, moved, *on_device, rows, columns, positions)


def scores(
    problem: Problem,
    dtype: torch.dtype = torch.float64,
    products: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """Return the scores of all rows, (rows, columns), computed in `dtype`; -inf where a key is not visible. products:
    of (heads, head_dim) and (head_dim, keys)."""
    q, weights = problem.flat(problem.q).to(dtype), problem.flat(problem.weights).to(dtype)
    if "q_descale" in problem.options:
        weights = weights * problem.flat(problem.options["q_descale"]).to(dtype)
    out = torch.full((len(problem.rows), problem.columns), -torch.inf, dtype=dtype, device=q.device)
    for t, (sequence, count) in enumerate(problem.rows):
        z = products(q[t], problem.keys[sequence][:count].to(dtype).T)
        out[t, :count] = weights[t] @ z.relu() * problem.key_scales[sequence][:count].to(dtype)
    return out


def topk(row: Tensor, count: int, topk: int) -> list[int]:
    """Return the chosen ones of the first `count` scores of a row by sorting, and -1 for the rest."""

    def order(index: int) -> tuple:
        value = values[index]
        return (value == value, -value if value == value else 0.0, index)

    values = row.tolist()[:count]
    chosen = sorted(sorted(range(count), key=order)[:topk])
    return chosen + [-1] * (topk - len(chosen))


def loss(
    problem: Problem, attn_q: Tensor, attn_k: list[Tensor], lse: Tensor, scale: float, indices: Tensor | None = None
) -> Tensor:
    """Return the loss of each row by autograd's operations, in the dtype of the arguments.

    attn_q: (rows, heads, dim). attn_k: of each sequence, (keys, heads of k, dim). lse: (rows, heads).
    """
    q, weights = problem.flat(problem.q), problem.flat(problem.weights)
    losses = []
    for t, (sequence, count) in enumerate(problem.rows):
        chosen = torch.arange(count)
        if indices is not None:
            chosen = torch.tensor([i for i in indices[t].tolist() if 0 <= i < count], dtype=torch.long)
        if not len(chosen):
            losses.append(q.new_zeros(()))
            continue
        k, keys = problem.keys[sequence][chosen], attn_k[sequence][chosen]
        keys = keys.repeat_interleave(attn_q.shape[1] // keys.shape[1], dim=1)
        log_softmax = (weights[t] @ (q[t] @ k.T).relu()).log_softmax(-1)
        a = (torch.einsum("hd,shd->hs", attn_q[t], keys) * scale - lse[t, :, None]).exp().sum(0)
        p = a / a.sum()
        losses.append((p * (p.log() - log_softmax)).sum())
    return torch.stack(losses)
