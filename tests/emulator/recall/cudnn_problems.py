"""Calls of nvidia-cudnn-frontend, as small as shows the faults."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fa4.oracle.cases import Judgement
from tests.emulator.public.rows import attention, by_formula, draw
from tests.emulator.recall.faults import Package, Problem

PACKAGE = Package("nvidia-cudnn-frontend", "1.32.0", "cudnn")


def _of_lengths(q: Tensor, k: Tensor, v: Tensor, *, lengths: tuple[int, ...]) -> Tensor:
    """(batch, heads, rows, dim). A row without keys is zero."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    beyond = torch.arange(k.shape[2]) >= torch.tensor(lengths)[:, None, None, None]
    return scores.masked_fill(beyond, -torch.inf).softmax(-1).nan_to_num(0.0) @ v


def _forward(heads: int, rows: int, lengths: tuple[int, ...], head_dim: int, seed: int) -> list[Judgement]:
    from cudnn.sdpa.fwd.api_dsl import sdpa_fwd_wrapper_dsl_sm100

    shape = (len(lengths), heads, rows, head_dim)
    q, k, v = draw(seed, shape, shape, shape)
    used = torch.tensor(lengths, dtype=torch.int32).cuda()
    out = sdpa_fwd_wrapper_dsl_sm100(q, k, v, seq_kv_lens=used)["o_tensor"]
    return by_formula(["out"], [out], functools.partial(_of_lengths, lengths=lengths), q, k, v)


def _plan(
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


def _decode(head_dim: int, seed: int) -> list[Judgement]:
    """4 heads share one of keys; the second sequence ends within a tile."""
    q, k, v = draw(seed, (2, 4, 1, head_dim), (2, 1, 500, head_dim), (2, 1, 500, head_dim))
    options = {"cga": 1} if head_dim == 128 else {}
    out = _plan(q, k, v, (500, 130), {}, pack_gqa=True, **options)
    return by_formula(["out"], [out], functools.partial(_of_lengths, lengths=(500, 130)), q, k, v)


def _e4m3(seed: int) -> list[Judgement]:
    """Causal, head_dim 256. What is allowed: the error of the formula with P rounded to e4m3."""
    shape = (1, 2, 300, 256)
    q, k, v = (x.to(torch.float8_e4m3fn) for x in draw(seed, shape, shape, shape))
    one = torch.ones(1, 1, 1, 1).cuda()
    scales = dict.fromkeys(("descale_q", "descale_k", "descale_v", "scale_o"), one)
    out = _plan(q, k, v, None, scales, is_causal=True, pertensor_fp8=True, dtype_o=torch.bfloat16, has_amax_o=False)

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2) * 256**-0.5).masked_fill(torch.ones(300, 300).triu(1) > 0, -torch.inf)
        p = (scores - scores.amax(-1, keepdim=True)).exp()
        rounded = p.to(torch.float8_e4m3fn).to(p.dtype) if p.dtype is torch.float32 else p
        return rounded @ v / p.sum(-1, keepdim=True)

    return by_formula(["out"], [out], formula, *(x.float() for x in (q, k, v)))


def _short_and_empty(seed: int) -> list[Judgement]:
    """Head dims (192, 128); most sequences have no keys."""
    lengths = (0, 0, 100, 0)
    q, k, v = draw(seed, (4, 2, 300, 192), (4, 2, 300, 192), (4, 2, 300, 128))
    out = _plan(q, k, v, lengths, {})
    return by_formula(["out"], [out], functools.partial(_of_lengths, lengths=lengths), q, k, v)


def _gradients(seqlen: int, seed: int) -> list[Judgement]:
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


def _rounded(x: Tensor) -> Tensor:
    """dS as a kernel multiplies it: in bfloat16, but for the oracle."""
    return x if x.dtype is torch.float64 else x.bfloat16().to(x.dtype)


def _indexer(seed: int) -> list[Judgement]:
    """4 queries choose 256 of 512 keys. The kernel leaves the gradient of the scores in an argument."""
    from cudnn.deepseek_sparse_attention.indexer_backward import indexer_backward_wrapper

    q, k, weights = draw(seed, (1, 4, 64, 128), (1, 512, 128), (1, 4, 64))
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(512, generator=rng)[:256] for _ in range(4)])
    target, predicted = (torch.randn(1, 4, 256, generator=rng).softmax(-1).cuda() for _ in range(2))
    got = indexer_backward_wrapper(q, weights, k, target, predicted, chosen[None].int().cuda(), torch.ones(1).cuda())

    def formula(q: Tensor, k: Tensor, weights: Tensor, dscores: Tensor) -> list[Tensor]:
        keys, dscores = k[0][chosen], dscores[0]
        scores = torch.einsum("shd,snd->shn", q[0], keys)
        ds = _rounded(dscores[:, None] * weights[0][:, :, None] * (scores > 0))
        of_pairs = torch.einsum("shn,shd->snd", ds, q[0]).flatten(0, 1)
        dk = torch.zeros_like(k[0]).index_add_(0, chosen.flatten(), of_pairs)
        dq = torch.einsum("shn,snd->shd", ds, keys)
        return [x[None] for x in (dq, torch.einsum("sn,shn->sh", dscores, scores.relu()), dk)]

    names = ["d_index_q", "d_weights", "d_index_k"]
    return by_formula(names, [got[name] for name in names], formula, q, k, weights, target)


def _dense_indexer(seed: int) -> list[Judgement]:
    """8 queries, 300 keys (three tiles), causal from key 292 on. The gradient of the scores is left in an argument."""
    from cudnn.deepseek_sparse_attention.indexer_backward import dense_indexer_backward_wrapper

    queries, keys = 8, 300
    q, k, weights = draw(seed, (1, queries, 64, 128), (1, keys, 128), (1, queries, 64))
    rng = torch.Generator().manual_seed(seed)
    scores = torch.einsum("bshd,bnd->bshn", q.cpu().float(), k.cpu().float()).relu()
    logits = torch.einsum("bsh,bshn->bsn", weights.cpu().float(), scores) / 64
    target = torch.rand(1, queries, keys, generator=rng)
    offset = torch.tensor([keys - queries], dtype=torch.int32)
    seen = torch.arange(keys) <= torch.arange(queries)[:, None] + offset
    norm, lse = target.masked_fill(~seen, 0.0).sum(-1), logits.masked_fill(~seen, -torch.inf).logsumexp(-1)
    dlogits = logits.cuda()
    got = dense_indexer_backward_wrapper(
        q, weights, k, target.cuda(), norm.cuda(), dlogits, lse.cuda(), torch.ones(1).cuda(),
        q_causal_offsets=offset.cuda(),
    )  # fmt: skip

    def formula(q: Tensor, k: Tensor, weights: Tensor, dscores: Tensor) -> list[Tensor]:
        dscores = dscores[0].masked_fill(~seen, 0.0)
        scores = torch.einsum("shd,nd->shn", q[0], k[0])
        ds = _rounded(dscores[:, None] * weights[0][:, :, None] * (scores > 0))
        dq, dk = torch.einsum("shn,nd->shd", ds, k[0]), torch.einsum("shn,shd->nd", ds, q[0])
        return [x[None] for x in (dq, torch.einsum("sn,shn->sh", dscores, scores.relu()), dk)]

    names = ["d_index_q", "d_weights", "d_index_k"]
    return by_formula(names, [got[name] for name in names], formula, q, k, weights, dlogits)


def _sparse_backward(head_dim: int, seed: int) -> list[Judgement]:
    """2 queries of 64 heads choose 256 of 256 keys, four tiles."""
    from cudnn.deepseek_sparse_attention.sparse_attention_backward.api import sparse_attention_backward_wrapper

    q, kv, upstream = draw(seed, (2, 64, head_dim), (256, head_dim), (2, 64, 512))
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(256, generator=rng) for _ in range(2)])
    sink = torch.randn(64, generator=rng)

    def attend(q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("thd,tnd->thn", q, kv[chosen]) * head_dim**-0.5
        with_sink = torch.cat([scores, sink.to(q.dtype).expand(2, 64)[..., None]], -1)
        p = with_sink.softmax(-1)[..., :-1]
        return torch.einsum("thn,tnd->thd", p, kv[chosen][..., :512]), scores.logsumexp(-1)

    def formula(q: Tensor, kv: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        given = [x.clone().requires_grad_() for x in (q, kv)]
        return torch.autograd.grad(attend(*given)[0], given, upstream)

    out, lse = attend(q.cpu().double(), kv.cpu().double())
    got = sparse_attention_backward_wrapper(
        q, kv, out.bfloat16().cuda(), upstream, lse.float().cuda(), sink.cuda(), chosen.int().cuda()
    )
    return by_formula(["dq", "dkv"], [got["dq"], got["dkv"]], formula, q, kv, upstream)


D128 = Problem(PACKAGE, "forward d128, lengths", "sm_100a",
               functools.partial(_forward, 4, 300, (300, 0, 100, 257), 128), sms=2)  # fmt: skip
D512 = Problem(PACKAGE, "forward d512, lengths", "sm_100a",
               functools.partial(_forward, 1, 200, (200, 0, 100), 512))  # fmt: skip


DECODE_D128 = Problem(PACKAGE, "decode d128", "sm_100a", functools.partial(_decode, 128), sms=1)
DECODE_D256 = Problem(PACKAGE, "decode d256", "sm_100a", functools.partial(_decode, 256))
E4M3 = Problem(PACKAGE, "forward d256 e4m3, causal", "sm_100a", _e4m3)
D192 = Problem(PACKAGE, "forward d192, few keys", "sm_100a", _short_and_empty, sms=2)
BACKWARD = Problem(PACKAGE, "backward d512, clusters of four", "sm_100a", functools.partial(_gradients, 4097))
INDEXER = Problem(PACKAGE, "indexer backward", "sm_100a", _indexer)
INDEXER_90 = Problem(PACKAGE, "indexer backward, sm_90a", "sm_90a", _indexer)
DENSE_INDEXER = Problem(PACKAGE, "dense indexer backward", "sm_100a", _dense_indexer)
SPARSE = Problem(PACKAGE, "sparse backward d576", "sm_100a", functools.partial(_sparse_backward, 576))
SPARSE_FREED = Problem(PACKAGE, "sparse backward d576, leftovers", "sm_100a", SPARSE.run, leftovers=True)
