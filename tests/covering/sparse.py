"""A row of the array of sparse calls and a seed as a call of `sparse_attention`, judged by the oracle, which gets the
lists as a mask of pairs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fa4
from fa4.oracle import cases
from fa4.oracle.reference import Functions
from fa4.runtime.spec import AttentionInputs
from tests.covering import calls, layouts, lengths
from tests.covering.judge import Judged, defined, judge
from tests.covering.model import Row
from tests.poisoned import poison, poison_past_the_end, poison_unused

_SMALL = lengths.Ranges((1, 60), few_keys=(150, 300), sequences=2)  # each query is a sequence of some launches


@dataclass
class SparseCall:
    """A call, and what it must give. tensors: as the call takes them. leaves: those with gradients."""

    row: Row
    problem: cases.Problem
    functions: Functions
    leaves: dict[str, Tensor]
    tensors: dict[str, Tensor | None]
    options: dict[str, Any]

    def run(self, backend: str = "auto") -> dict[str, Tensor]:
        """out, lse and the gradients that the row asks for."""
        trains = self.row["direction"] == "training"
        with torch.set_grad_enabled(trains):
            out, lse = fa4.sparse_attention(
                **self.leaves | self.tensors, **self.options, return_lse=True, backend=backend
            )
        results = {"out": out.detach(), "lse": lse.detach()}
        if trains:
            outputs, given = [out], [self.problem.dout]
            if self.row["dlse"] == "yes":
                outputs.append(lse)
                given.append(defined(self.problem.dlse, lse.detach()))
            grads = torch.autograd.grad(outputs, list(self.leaves.values()), given)
            results |= {f"d{name}": x for name, x in zip(self.leaves, grads)}
        return results

    def judged(self, results: dict[str, Tensor]) -> list[Judged]:
        return judge(self.problem, results, self.functions, has_dlse=self.row["dlse"] == "yes")


def _lists(
    row: Row, sizes: tuple[int, ...], blocks: int, most: int, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """indices (*sizes, n) of blocks in any order, with holes and, for `some`, blocks past the last and blocks that are
    there twice; and counts."""
    n = {"some": min(blocks + 2, most), "all": blocks, "none": min(blocks, most)}[row["chosen"]]
    past = blocks + 2 if row["chosen"] == "some" else blocks
    order = torch.rand(*sizes, past, generator=generator).argsort(-1)[..., :n].int()
    if row["chosen"] == "some":
        order = torch.where(torch.rand(order.shape, generator=generator) < 0.1, order.roll(1, -1), order)
    if row["chosen"] != "all":
        holes = 1.1 if row["chosen"] == "none" else 0.2
        order = torch.where(torch.rand(order.shape, generator=generator) < holes, -1, order)
    counts = None
    if row["counts"] == "yes":
        counts = torch.randint(0, n + 1, sizes, generator=generator).int()
        is_read = torch.arange(n) < counts[..., None]
        order = torch.where(is_read, order, poison(torch.empty(order.shape, dtype=torch.int32)))
    return order, counts


def _visible(problem: cases.Problem, row: Row, indices: Tensor, counts: Tensor | None, window: int | None) -> Tensor:
    """(batch, heads_q, queries, keys) of positions in sequences: whether a query attends to a key."""
    i, heads, size = problem.inputs, problem.spec.heads_q, int(row["granularity"])
    visible = torch.zeros(max(i.batch, 1), heads, max(i.max_seqlen_q, 1), max(i.max_seqlen_k, 1), dtype=torch.bool)
    for b in range(i.batch):
        if i.cu_seqlens_q is None or i.cu_seqlens_k is None:
            first, queries, keys = 0, i.max_seqlen_q, i.max_seqlen_k
        else:
            (first, stop), (k_first, k_stop) = (x[b : b + 2].tolist() for x in (i.cu_seqlens_q, i.cu_seqlens_k))
            queries, keys = stop - first, k_stop - k_first
        if i.seqused_k is not None:
            keys = int(i.seqused_k[b])
        for query in range(queries):
            position = query + keys - queries
            end = min(keys, position + 1) if row["causal"] == "yes" else keys
            if row["per"] == "block":
                place: tuple[int, ...] = (b, query // size)
            else:
                place = (b, query) if i.cu_seqlens_q is None else (first + query,)
            for list_ in range(indices.shape[-2]):
                chosen = indices[place][list_]
                chosen = chosen[: indices.shape[-1] if counts is None else int(counts[place][list_])]
                group = heads // indices.shape[-2]
                of_heads = visible[b, list_ * group : (list_ + 1) * group, query]
                for block in chosen[chosen >= 0].tolist():
                    of_heads[:, block * size : max(min((block + 1) * size, end), block * size)] = True
                if window is not None and position >= 0:
                    of_heads[:, max(position - window, 0) : position + 1] = True
    return visible


def _mask(visible: Tensor, device: str) -> Any:
    visible = visible.to(device)
    return lambda b, h, q_idx, kv_idx: visible[b, h, q_idx, kv_idx]


def _in_pages(x: Tensor, size: int, used: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A cache of pages in any order with the rows of padded x, and poison elsewhere; and its page table."""
    batch, rows = x.shape[:2]
    pages = -(-rows // size)
    table = torch.randperm(batch * pages + 1, generator=generator)[: batch * pages].view(batch, pages)
    cache = poison(torch.empty(batch * pages + 1, size, *x.shape[2:], dtype=x.dtype))
    for b in range(batch):
        for row in range(int(used[b])):
            cache[table[b, row // size], row % size] = x[b, row]
    return cache, table.int()


def build(row: Row, seed: int, device: str = "cpu", is_small: bool = True, variant: int | None = None) -> SparseCall:
    """The call of a row; seed and variant as in `calls.build`."""
    fixed = random.Random(f"{seed if variant is None else variant} {sorted(row.items())}")
    draw = random.Random(f"{seed} {sorted(row.items())}")
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    head_dim, head_dim_v = calls.head_dims(row, fixed)
    heads_q, heads_kv = {"1": (2, 2), "2": (4, 2), "8": (8, 1), "mqa": (3, 1), "128": (128, 1)}[row["group"]]
    of = _SMALL if is_small else lengths.MIDDLE
    is_packed = row["form"] == "packed"
    shape = (lengths.packed if is_packed else lengths.dense)(row | dict(block_mask="some"), draw, of)
    case = cases.Case(
        "covering", heads_q=heads_q, heads_kv=heads_kv, head_dim=head_dim, head_dim_v=head_dim_v,
        dtype=getattr(torch, row["dtype"]), softmax_scale=calls.scale(row, head_dim), sink=row["sink"] == "yes",
        deterministic=row["deterministic"] == "yes", **shape,
    )  # fmt: skip
    has_used = row["form"] in ("used", "pages")
    case = cases.replace(case, seqused=lengths.used({"seqused": "keys" if has_used else "none"}, case, draw))
    problem = poison_past_the_end(poison_unused(cases.make(case, draw.randrange(2**31))))
    problem = layouts.laid_out(problem, row["layout"], generator)
    i, size = problem.inputs, int(row["granularity"])
    is_latent = row["head_dim_v"] == "latent"
    if is_latent:  # v is the memory of k's first columns
        i = i._replace(v=i.k[..., :head_dim_v])
        problem = cases.replace(problem, inputs=i)
    window = {"no": None, "own": 0, "some": fixed.randint(1, 90)}[row["window"]]
    lists = {"one": 1, "key_heads": heads_kv, "query_heads": heads_q}[row["lists"]]
    if row["per"] == "block":
        sizes: tuple[int, ...] = (i.batch, -(-i.max_seqlen_q // size), lists)
    else:
        sizes = (*i.q.shape[:-2], lists)
    indices, counts = _lists(row, sizes, -(-i.max_seqlen_k // size), max(192 // size, 1), generator)
    visible = _visible(problem, row, indices, counts, window)
    leaves = {"q": i.q, "k": i.k, "v": i.v} | ({} if i.sink is None else {"sink": i.sink})
    tensors: dict[str, Tensor | None] = {"indices": indices, "counts": counts, "seqused_k": i.seqused_k}
    options: dict[str, Any] = dict(
        granularity=size, per=row["per"], causal=row["causal"] == "yes", window=window,
        softmax_scale=case.softmax_scale, deterministic=case.deterministic,
    )  # fmt: skip
    if is_packed:
        tensors |= dict(cu_seqlens_q=i.cu_seqlens_q, cu_seqlens_k=i.cu_seqlens_k)
        bounds = lengths.bounds(
            "exact" if row["per"] == "block" else draw.choice(("exact", "none", "tensor")), [*i.max_seqlens]
        )
        options |= dict(zip(("max_seqlen_q", "max_seqlen_k"), bounds))
    elif row["form"] == "pages":
        assert i.seqused_k is not None
        page = fixed.choice((1, 16, 24, 64))
        seed_of_pages = draw.randrange(2**31)
        for name in "kv":
            of_pages = torch.Generator().manual_seed(seed_of_pages)
            leaves[name], tensors["page_table"] = _in_pages(leaves[name], page, i.seqused_k, of_pages)

    def there(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(device)

    trains = row["direction"] == "training"
    leaves = {name: x.detach().to(device).requires_grad_(trains) for name, x in leaves.items()}
    if is_latent:  # a leaf of its own, so that its gradient is no part of k's
        leaves["v"] = leaves["k"].detach()[..., :head_dim_v].requires_grad_(trains)
    inputs = AttentionInputs(*(there(x) for x in i.tensors), *i.max_seqlens)  # type: ignore[arg-type]
    problem = cases.replace(problem, inputs=inputs, dout=problem.dout.to(device), dlse=problem.dlse.to(device))
    tensors = {name: there(x) for name, x in tensors.items()}
    return SparseCall(row, problem, Functions(mask=_mask(visible, device)), leaves, tensors, options)
