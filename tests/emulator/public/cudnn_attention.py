"""Attention of nvidia-cudnn-frontend, as small as shows its kernels and faults that were in them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fa4.oracle.cases import Judgement
from tests.emulator.public.rows import attention, by_formula, draw


def of_lengths(q: Tensor, k: Tensor, v: Tensor, *, lengths: tuple[int, ...]) -> Tensor:
    """(batch, heads, rows, dim). A row without keys is zero."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    beyond = torch.arange(k.shape[2]) >= torch.tensor(lengths)[:, None, None, None]
    return scores.masked_fill(beyond, -torch.inf).softmax(-1).nan_to_num(0.0) @ v


def forward(heads: int, rows: int, lengths: tuple[int, ...], head_dim: int, seed: int) -> list[Judgement]:
    from cudnn.sdpa.fwd.api_dsl import sdpa_fwd_wrapper_dsl_sm100

    shape = (len(lengths), heads, rows, head_dim)
    q, k, v = draw(seed, shape, shape, shape)
    used = torch.tensor(lengths, dtype=torch.int32).cuda()
    out = sdpa_fwd_wrapper_dsl_sm100(q, k, v, seq_kv_lens=used)["o_tensor"]
    return by_formula(["out"], [out], functools.partial(of_lengths, lengths=lengths), q, k, v)


def plan(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...] | None, scales: dict[str, Tensor], **options: Any
) -> Tensor:
    """Output of the class that plans a call; it takes more options than the function."""
    from cudnn.sdpa.fwd.api_dsl import SdpaFwdDslSm100

    batch, heads, rows, _ = q.shape
    out = torch.empty(batch, rows, heads, v.shape[-1], dtype=torch.bfloat16, device="cuda").transpose(1, 2)
    lse = torch.empty(batch, heads, rows, device="cuda")
    used = torch.tensor(lengths, dtype=torch.int32).cuda() if lengths else None
    api = SdpaFwdDslSm100(q, k, v, out, lse, seq_kv_lens_present=used is not None, **options)
    api.check_support()
    api.compile()
    workspace = torch.empty(api.scratch_workspace_bytes(), dtype=torch.uint8, device="cuda")
    api.execute(q, k, v, out, lse, seq_kv_lens=used, workspace=workspace if workspace.numel() else None, **scales)
    return out


def decode(head_dim: int, seed: int) -> list[Judgement]:
    """4 heads share one of keys; the second sequence ends within a tile."""
    q, k, v = draw(seed, (2, 4, 1, head_dim), (2, 1, 500, head_dim), (2, 1, 500, head_dim))
    options = {"cga": 1} if head_dim == 128 else {}
    out = plan(q, k, v, (500, 130), {}, pack_gqa=True, **options)
    return by_formula(["out"], [out], functools.partial(of_lengths, lengths=(500, 130)), q, k, v)


def e4m3(seed: int) -> list[Judgement]:
    """Causal, head_dim 256. What is allowed: the error of the formula with P rounded to e4m3."""
    shape = (1, 2, 300, 256)
    q, k, v = (x.to(torch.float8_e4m3fn) for x in draw(seed, shape, shape, shape))
    one = torch.ones(1, 1, 1, 1).cuda()
    scales = dict.fromkeys(("descale_q", "descale_k", "descale_v", "scale_o"), one)
    out = plan(q, k, v, None, scales, is_causal=True, pertensor_fp8=True, dtype_o=torch.bfloat16, has_amax_o=False)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2) * 256**-0.5).masked_fill(torch.ones(300, 300).triu(1) > 0, -torch.inf)
        p = (scores - scores.amax(-1, keepdim=True)).exp()
        rounded = p.to(torch.float8_e4m3fn).to(p.dtype) if p.dtype is torch.float32 else p
        return rounded @ v / p.sum(-1, keepdim=True)

    return by_formula(["out"], [out], formula, *(x.float() for x in (q, k, v)))


def short_and_empty(seed: int) -> list[Judgement]:
    """Head dims (192, 128); most sequences have no keys."""
    lengths = (0, 0, 100, 0)
    q, k, v = draw(seed, (4, 2, 300, 192), (4, 2, 300, 192), (4, 2, 300, 128))
    out = plan(q, k, v, lengths, {})
    return by_formula(["out"], [out], functools.partial(of_lengths, lengths=lengths), q, k, v)


def gradients(seqlen: int, seed: int) -> list[Judgement]:
    """Head_dim 512. seqlen: of which the package's kernels are used."""
    from fa4.emulator.cudnn import Attention, kernels_of

    shapes = (1, 200, 2, 512), (1, 200, 1, 512), (1, 200, 1, 512), (1, 200, 2, 512)
    q, k, v, upstream = draw(seed, *shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = Attention.apply(*leaves, True)
    with kernels_of(seqlen):
        grads = torch.autograd.grad(out, leaves, upstream)

    def formula(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attention(*given, causal=True), given, upstream)

    return by_formula(["dq", "dk", "dv"], grads, formula, *(x.detach() for x in (q, k, v)), upstream)


def _through_autograd(*inputs: Tensor, causal: bool) -> list[Tensor]:
    """Gradients of q, k and v by formula; the last input is the upstream gradient."""
    *given, upstream = inputs
    leaves = [x.clone().requires_grad_() for x in given]
    return list(torch.autograd.grad(attention(*leaves, causal=causal), leaves, upstream))


def backward_d128(head_dim: int, causal: bool, deterministic: bool, seed: int) -> list[Judgement]:
    """`SdpaBwdDslSm100D128`: 3 heads of 300 rows, three tiles each; out and lse come from the formula."""
    from cudnn.sdpa.bwd.api_dsl_sm100_d128 import SdpaBwdDslSm100D128

    q, k, v, upstream = draw(seed, *((1, 300, 3, head_dim),) * 4)
    exact = [x.cpu().double() for x in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", *exact[:2]) * head_dim**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(300, 300).triu(1) > 0, -torch.inf)
    out = attention(*exact, causal=causal).bfloat16().contiguous().cuda()
    lse = scores.logsumexp(-1).float()[..., None].contiguous().cuda()
    grads = [torch.empty_like(x) for x in (q, k, v)]
    tensors = [x.transpose(1, 2) for x in (q, k, v, out, upstream)] + [lse] + [x.transpose(1, 2) for x in grads]
    api = SdpaBwdDslSm100D128(*tensors, is_causal=causal, deterministic=deterministic)
    api.check_support()
    api.compile()
    size = api.scratch_workspace_bytes()
    api.execute(*tensors, workspace=torch.empty(size, dtype=torch.uint8, device="cuda") if size else None)
    formula = functools.partial(_through_autograd, causal=causal)
    return by_formula(["dq", "dk", "dv"], grads, formula, q, k, v, upstream)


def backward_sm80(head_dim: int, seed: int) -> list[Judgement]:
    """Deterministic and causal: 2 heads of 300 rows."""
    from cudnn.sdpa.bwd import sdpa_bwd_wrapper_sm80

    q, k, v, upstream = draw(seed, *((1, 300, 2, head_dim),) * 4)
    exact = [x.cpu().double() for x in (q, k, v)]
    scores = torch.einsum("bqhd,bkhd->bhqk", *exact[:2]) * head_dim**-0.5
    lse = scores.masked_fill(torch.ones(300, 300).triu(1) > 0, -torch.inf).logsumexp(-1)
    out = attention(*exact, causal=True).bfloat16().cuda()
    heads_first = [x.transpose(1, 2) for x in (q, k, v, out, upstream)]
    got = sdpa_bwd_wrapper_sm80(*heads_first, lse.float().cuda(), is_causal=True, deterministic=True)
    grads = [got[name].transpose(1, 2) for name in ("dq_tensor", "dk_tensor", "dv_tensor")]
    formula = functools.partial(_through_autograd, causal=True)
    return by_formula(["dq", "dk", "dv"], grads, formula, q, k, v, upstream)
