"""flash-attn-4: forward and backward through `flash_attn.cute.interface`, with the cases and the judge of fa4."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from fa4.oracle import cases, reference
from fa4.oracle.cases import Case, Judgement, Problem
from fa4.runtime.spec import Gradients
from tests.emulator.public.rows import Row, by_formula

PACKAGE = "flash-attn-4"
_EXP2_ERROR = 8.8e-5
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k")


def _attend(problem: Problem, tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> Any:
    """out and lse of the package's function."""
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    inputs, flags = problem.inputs, problem.case.flags()
    flags["window_size"] = tuple(None if side == -1 else side for side in flags["window_size"])
    arguments = {**tensors, **flags, **options, "return_lse": True}
    if not inputs.varlen:
        return flash_attn_func(**arguments)
    return flash_attn_varlen_func(**arguments, **{name: getattr(inputs, name) for name in _LENGTHS})


def _judge_forward(on_host: Problem, out: torch.Tensor, lse: torch.Tensor) -> list[Judgement]:
    """Judge out by twice the error of the same precision, and lse by what the package's exp2 may err: some of its
    values come from a polynomial of degree 3, whose relative error is up to 8.8e-5 (bfloat16 has 3.9e-3)."""
    exact, floor = (reference.forward(on_host.inputs, on_host.spec, precise=precise) for precise in (True, False))
    of_out = cases.judge("out", out.detach().cpu(), exact[0], floor[0])
    of_lse = cases.judge("lse", lse.detach().cpu(), exact[1], floor[1])
    return [of_out, replace(of_lse, allowed=of_lse.allowed + _EXP2_ERROR)]


def _forward(case: Case, options: dict[str, Any], seed: int) -> list[Judgement]:
    problem = cases.make(case, seed, "cuda")
    return _judge_forward(cases.make(case, seed), *_attend(problem, problem.tensors(), options))


def _backward(case: Case, options: dict[str, Any], seed: int) -> list[Judgement]:
    problem = cases.make(case, seed, "cuda")
    leaves = {name: x.detach().clone().requires_grad_() for name, x in problem.tensors().items()}
    out, lse = _attend(problem, leaves, options)
    on_host = cases.make(case, seed)
    if case.head_dim == 256:  # for which the package takes no gradient of lse
        on_host = replace(on_host, dlse=torch.zeros_like(on_host.dlse))
        grads = torch.autograd.grad(out, list(leaves.values()), problem.dout)
    else:
        dlse = problem.dlse.masked_fill(lse.detach() == -torch.inf, 0.0)
        grads = torch.autograd.grad((out, lse), list(leaves.values()), (problem.dout, dlse))
    judged = cases.judge_backward(on_host, Gradients(*(grad.cpu() for grad in grads)))
    return _judge_forward(on_host, out, lse) + judged


def _latent(q: torch.Tensor, qv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attention with absorbed weights: scores of q k + qv v, and v again as the values. One key/value head."""
    scores = torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) + torch.einsum("bqhd,bkd->bhqk", qv, v[:, :, 0])
    scores = scores * (q.shape[-1] + v.shape[-1]) ** -0.5
    if causal:
        rows, columns = scores.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhqk,bkd->bqhd", scores.softmax(-1), v[:, :, 0])


def _latent_forward(queries: int, keys: int, heads: int, causal: bool, seed: int) -> list[Judgement]:
    from flash_attn.cute.interface import flash_attn_func

    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, queries, heads, 64), (1, queries, heads, 512), (1, keys, 1, 64), (1, keys, 1, 512))
    q, qv, k, v = (torch.randn(shape, generator=generator).bfloat16().cuda() for shape in shapes)
    out = flash_attn_func(q, k, v, qv, causal=causal)
    return by_formula(["out"], [out[0] if isinstance(out, tuple) else out],
                      functools.partial(_latent, causal=causal), q, qv, k, v)  # fmt: skip


def _paged(page: int, seed: int) -> list[Judgement]:
    """Keys and values in pages of a pool, in an order of their own."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    case = Case("paged", batch=2, seqlen_q=5, seqlen_k=256, heads_q=4, heads_kv=1, head_dim=128)
    problem, pages = cases.make(case, seed, "cuda"), 256 // page
    order = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(seed))
    pools = []
    for x in (problem.inputs.k, problem.inputs.v):
        pool = torch.empty(2 * pages, page, 1, 128, dtype=x.dtype, device="cuda")
        pool[order.cuda()] = x.reshape(2 * pages, page, 1, 128)
        pools.append(pool)
    table = order.reshape(2, pages).to(torch.int32).cuda()
    used = torch.full((2,), 256, dtype=torch.int32).cuda()
    out, lse = flash_attn_varlen_func(problem.inputs.q, *pools, page_table=table, seqused_k=used, return_lse=True)
    return _judge_forward(cases.make(case, seed), out, lse)


def _rows() -> list[Row]:
    full = Case("full d128", seqlen_q=300, seqlen_k=300, head_dim=128)
    shared = (
        full,
        Case("causal d128", seqlen_q=300, seqlen_k=300, head_dim=128, causal=True),
        Case("causal d64, more keys", seqlen_q=150, seqlen_k=280, causal=True),
        Case("d96", seqlen_q=150, seqlen_k=150, head_dim=96),
        Case("window (63, 0)", seqlen_q=260, seqlen_k=260, head_dim=128, window_size=(63, 0)),
        Case("softcap", seqlen_q=150, seqlen_k=150, head_dim=128, softcap=15.0, logits=4.0, causal=True),
        Case("sink, causal", seqlen_q=150, seqlen_k=150, head_dim=128, sink=True, causal=True),
        Case("4 heads on 1, causal", seqlen_q=150, seqlen_k=150, heads_q=4, heads_kv=1, head_dim=128, causal=True),
        Case("varlen, causal", lengths=((37, 37), (200, 200), (1, 1)), head_dim=128, causal=True),
        Case("head dims (192, 128), causal", seqlen_q=200, seqlen_k=200, head_dim=192, head_dim_v=128, causal=True),
        Case("d256", seqlen_q=150, seqlen_k=280, head_dim=256),
        Case("d256, causal", seqlen_q=200, seqlen_k=200, head_dim=256, causal=True),
    )  # fmt: skip
    backward = (
        Case("full d64", seqlen_q=200, seqlen_k=280),
        *(case for case in shared if not case.name.startswith("d256")),
        Case("d256, causal", seqlen_q=200, seqlen_k=200, head_dim=256, causal=True),
        Case("deterministic d128, causal", seqlen_q=280, seqlen_k=280, head_dim=128, causal=True, deterministic=True),
        Case("deterministic d64", seqlen_q=150, seqlen_k=280, deterministic=True),
        Case("varlen, 4 heads on 2", lengths=((60, 130), (150, 33)), heads_q=4, heads_kv=2, head_dim=128),
    )
    rows = []
    for chip in ("sm_100a", "sm_90a"):
        for direction, run, listed in (("forward", _forward, shared), ("backward", _backward, backward)):
            for case in listed:
                rows.append(Row(PACKAGE, f"{direction}, {case}", chip, functools.partial(run, case, {})))
        rows += [
            Row(PACKAGE, "forward, pages of 128 keys", chip, functools.partial(_paged, 128)),
            Row(PACKAGE, "forward, pages of 16 keys", chip, functools.partial(_paged, 16)),
        ]  # fmt: skip
        several = {"batch": 2, "heads_q": 2, "heads_kv": 2, "seqlen_q": 400, "seqlen_k": 400, "head_dim": 128}
        rows += [  # tiles a CTA, or waves
            Row(PACKAGE, "forward, causal d128, 2 x 2 heads of 400 rows on 2 SMs", chip, functools.partial(
                _forward, Case("", causal=True, **several), {}), sms=2),
            Row(PACKAGE, "backward, full d128, 2 x 2 heads of 400 rows on 2 SMs", chip, functools.partial(
                _backward, Case("", **several), {}), sms=2),
        ]  # fmt: skip
    parts = Case("", seqlen_q=1, seqlen_k=700, head_dim=128)  # for which the package has a kernel on Blackwell only
    rows.append(Row(PACKAGE, "forward, 3 parts of the keys", "sm_100a",
                    functools.partial(_forward, parts, {"num_splits": 3})))  # fmt: skip
    latent = functools.partial(_latent_forward, 3, 300)
    rows += [
        Row(PACKAGE, "latent attention (64 + 512), 128 heads", "sm_100a", functools.partial(latent, 128, False)),
        Row(PACKAGE, "latent attention (64 + 512), 128 heads, causal", "sm_100a",
            functools.partial(latent, 128, True)),
        Row(PACKAGE, "latent attention (64 + 512), 16 heads", "sm_100a", functools.partial(latent, 16, False)),
        Row(PACKAGE, "forward, causal d64, 300 x 1300", "sm_100a", functools.partial(
            _forward, Case("", seqlen_q=300, seqlen_k=1300, causal=True), {})),
        Row(PACKAGE, "forward, causal d128", "sm_80", functools.partial(_forward, shared[1], {})),
        Row(PACKAGE, "forward, full d64", "sm_80", functools.partial(_forward, backward[0], {})),
    ]  # fmt: skip
    return rows


ROWS = _rows()
