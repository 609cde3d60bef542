"""Sparse attention of nvidia-cudnn-frontend, as small as shows its kernels and faults that were in them."""

from __future__ import annotations

import torch
from torch import Tensor

from fa4.oracle.cases import Judgement
from tests.emulator.public.rows import by_formula, draw


def _rounded(x: Tensor) -> Tensor:
    """dS as a kernel multiplies it: in bfloat16, but for the oracle."""
    return x if x.dtype is torch.float64 else x.bfloat16().to(x.dtype)


def indexer(seed: int) -> list[Judgement]:
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


def dense_indexer(seed: int) -> list[Judgement]:
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


def sparse_backward(head_dim: int, seed: int) -> list[Judgement]:
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


def sparse_forward(seed: int) -> list[Judgement]:
    """3 queries of 64 heads choose 128 of 512 keys of 512 columns."""
    from cudnn.deepseek_sparse_attention.sparse_attention_forward.api import sparse_attention_forward_wrapper

    q, kv = draw(seed, (3, 64, 512), (512, 512))
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(512, generator=rng)[:128] for _ in range(3)])
    got = sparse_attention_forward_wrapper(q, kv, chosen.int().cuda())
    out = next(iter(got.values())) if isinstance(got, dict) else got[0]

    def formula(q: Tensor, kv: Tensor) -> Tensor:
        scores = torch.einsum("thd,tnd->thn", q, kv[chosen]) * 512**-0.5
        return torch.einsum("thn,tnd->thd", scores.softmax(-1), kv[chosen])

    return by_formula(["out"], [out], formula, q, kv)


def of_blocks(block: int, backward: bool, seed: int) -> list[Judgement]:
    """Block-sparse attention: 2 heads of 4 blocks, of which every block of queries sees 2."""
    from cudnn.block_sparse_attention import block_sparse_attention_backward, block_sparse_attention_forward

    rows = 4 * block
    q, k, v, upstream = draw(seed, *((1, 2, rows, 128),) * 4)
    rng = torch.Generator().manual_seed(seed)
    seen = torch.stack([torch.randperm(4, generator=rng)[:2].sort()[0] for _ in range(8)]).reshape(1, 2, 4, 2)
    mask = torch.zeros(1, 2, 4, 4, dtype=torch.bool).scatter_(3, seen, True)
    mask = mask.repeat_interleave(block, 2).repeat_interleave(block, 3)
    index = seen.int().cuda()
    got = block_sparse_attention_forward(q, k, v, index, 2, sparse_block_size=block)
    out, lse = (got[name] for name in ("o_tensor", "lse_tensor"))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2) * 128**-0.5).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v

    judged = by_formula(["out"], [out], attend, q, k, v)
    if not backward:
        return judged
    grads = block_sparse_attention_backward(upstream, q, k, v, out, lse, index, 2, sparse_block_size=block)

    def formula(q: Tensor, k: Tensor, v: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(attend(*given), given, upstream)

    names = ["dq_tensor", "dk_tensor", "dv_tensor"]
    return judged + by_formula(["dq", "dk", "dv"], [grads[name] for name in names], formula, q, k, v, upstream)
