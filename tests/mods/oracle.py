"""Attention with a score_mod and mask_mod by formula: in float64, or rounded where kernels round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import _vmap_for_bhqkv, create_mask

import fa4
from fa4.bwd.workspace import Allocator, Workspace
from fa4.emulator import emulate
from fa4.oracle.cases import DRAWS, assert_right, judge_by_draws
from fa4.runtime.spec import Gradients


@dataclass
class Problem:
    """q (batch, rows, heads, dim), k, v and upstream gradients in bfloat16; `mods` go to the public function."""

    name: str
    queries: int
    keys: int
    heads: int = 2
    heads_kv: int = 2
    batch: int = 1
    head_dim: int = 32
    head_dim_v: int | None = None  # as head_dim
    score_mod: Callable | None = None
    mask_mod: Callable | None = None
    trained: tuple[Tensor, ...] = ()  # that the score_mod captured
    same_where_seen: Callable | None = None  # a score_mod with finite derivatives everywhere, for autograd
    call: dict = field(default_factory=dict)

    def make(self, seed: int, device: str = "cpu") -> tuple[list[Tensor], Tensor]:
        generator = torch.Generator().manual_seed(seed)
        rows = [(self.queries, self.heads), *[(self.keys, self.heads_kv)] * 2, (self.queries, self.heads)]
        wide = self.head_dim_v or self.head_dim
        normal = [
            torch.randn(self.batch, *shape, dim, generator=generator).to(device, torch.bfloat16)
            for shape, dim in zip(rows, (self.head_dim, self.head_dim, wide, wide))
        ]
        return normal[:3], normal[3]


def by_formula(problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, precise: bool) -> list[Tensor]:
    """out, lse, dq, dk, dv and gradients of `trained`."""
    dtype = torch.float64 if precise else torch.float32
    group, scale = problem.heads // problem.heads_kv, problem.head_dim**-0.5

    def rounded(x: Tensor) -> Tensor:
        return x if precise else x.to(torch.bfloat16).to(dtype)

    qs, do = (x.transpose(1, 2).to(dtype) for x in (q, dout))
    ks, vs = (x.transpose(1, 2).to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    x = (qs @ ks.transpose(2, 3) * scale).requires_grad_()
    b, h, row, key = (
        torch.arange(extent, device=q.device)
        for extent in (problem.batch, problem.heads, problem.queries, problem.keys)
    )
    s, cap = x * 1, problem.call.get("softcap")
    if cap:
        s = cap * torch.tanh(x / cap)
    if problem.score_mod is not None:
        with TransformGetItemToIndex():
            s = _vmap_for_bhqkv(problem.same_where_seen or problem.score_mod, prefix=(0,))(x, b, h, row, key)
    seen = torch.ones_like(x, dtype=torch.bool)
    if problem.mask_mod is not None:
        sizes = problem.batch, problem.heads, problem.queries, problem.keys
        seen &= create_mask(problem.mask_mod, *sizes, device=q.device)
    if problem.call.get("causal"):
        seen &= key <= row[:, None] + problem.keys - problem.queries
    s = s.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(s.detach(), dim=3)
    peak = s.detach().amax(dim=3, keepdim=True).nan_to_num(neginf=0.0)
    weights = torch.exp(s.detach() - peak)
    out = rounded(weights) @ vs / weights.sum(3, keepdim=True).clamp(min=1e-300 if precise else 1e-30)
    p = torch.exp(s.detach() - lse.nan_to_num(neginf=torch.inf)[..., None])
    ds = p * (do @ vs.transpose(2, 3) - (do * rounded(out)).sum(3, keepdim=True))
    dx, *of_trained = torch.autograd.grad(s, [x, *problem.trained], ds)
    dx = rounded(dx)

    def per_kv_head(x: Tensor) -> Tensor:
        return x.unflatten(1, (problem.heads_kv, group)).sum(2)

    dk, dv = per_kv_head(dx.transpose(2, 3) @ qs * scale), per_kv_head(rounded(p).transpose(2, 3) @ do)
    results = [out, dx @ ks * scale, dk, dv]
    out, dq, dk, dv = (
        x.detach().transpose(1, 2) if precise else x.detach().transpose(1, 2).bfloat16() for x in results
    )
    return [out, lse, dq, dk, dv, *of_trained]


def results_of(problem: Problem, seed: int, backend: str, gradients: bool = True, device: str = "cpu") -> list[Tensor]:
    """out, lse and the gradients of q, k, v and `trained` that the public function gives."""
    (q, k, v), dout = problem.make(seed, device)
    leaves = [x.clone().requires_grad_(gradients) for x in (q, k, v)]
    mods = dict(score_mod=problem.score_mod)
    if "block_mask" not in problem.call:
        mods["mask_mod"] = problem.mask_mod
    out, lse = fa4.flash_attn_func(*leaves, backend=backend, return_lse=True, **mods, **problem.call)
    grads = torch.autograd.grad(out, [*leaves, *problem.trained], dout) if gradients else ()
    return [x.detach() for x in (out, lse, *grads)]


def assert_kernel_is_right(
    problem: Problem, seed: int, backend: str, gradients: bool = True, device: str = "cpu"
) -> None:
    """Judge all that the public function gives."""
    given = results_of(problem, seed, backend, gradients, device)

    def references(of: int, precise: bool) -> list[Tensor]:
        (q, k, v), dout = problem.make(of, device)
        return by_formula(problem, q, k, v, dout, precise)

    names = "out", "lse", *Gradients._fields[:3], *(f"captured {tuple(x.shape)}" for x in problem.trained)
    results = dict(zip(names, given))
    judged = judge_by_draws(results, references, seed, range(seed + 1, seed + DRAWS))
    assert_right(judged, f"{problem.name}, seed {seed}")


SCHEDULES = "round_robin", "random", "adversarial"


def sums_of_dq(problem: Problem, seed: int, backend: str, chip: str, **options) -> set[bytes]:
    """Different float32 sums of dQ, to the bit, that orders of events on the emulated chip give: few last bits of them
    outlive the rounding to bfloat16."""
    allocate, kept = Allocator.__call__, list[Workspace]()

    def keep(*given):
        kept.append(allocate(*given))
        return kept[-1]

    for schedule in SCHEDULES:
        with pytest.MonkeyPatch.context() as patch, emulate(chip, seed=seed, schedule=schedule, **options):
            patch.setattr(Allocator, "__call__", keep)
            results_of(problem, seed, backend)
    return {of_run.dq_sum.numpy().tobytes() for of_run in kept}
