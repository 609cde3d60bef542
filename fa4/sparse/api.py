"""`sparse_attention`: attention of each query to a chosen part of the keys."""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from ..api.dense import flash_attn_func, flash_attn_varlen_func
from ..torch_ops import checks as common
from . import attend, blocks, checks
from .selection import Layout, Places, Rule

NARROWEST_BLOCK = 16  # of a block mask


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    *,
    granularity: int = 1,
    per: Literal["token", "block"] = "token",
    counts: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    sink: Tensor | None = None,
    softmax_scale: float | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention of each query to the keys of the blocks that it lists, as selected by an indexer or a router.

            out = softmax(softmax_scale * q K^T) V   over the keys of the listed blocks, and of the window

    One softmax covers the selected keys, the window and the sink. Differentiable in q, k, v and the sink, without
    synchronising with the host.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim); packed, (total_q, heads_q, head_dim). fp16, bf16, fp32 or fp64.
        k: (batch, seqlen_k, heads_kv, head_dim); packed, (total_k, heads_kv, head_dim); with page_table (pages, rows of
            a page, heads_kv, head_dim). v: the same with head_dim_v columns. For latent attention v is k[..., :512],
            a view: then Hopper loads each row once.
        indices: int32 numbers of blocks of keys, counted from a sequence's first key, in any order; -1 for none. Blocks
            past the last key hold none. A block that is in a list twice counts once.
            per="token": (batch, seqlen_q, lists, n); packed, (total_q, lists, n).
            per="block": (batch, ceil(seqlen_q / granularity), lists, n); packed, max_seqlen_q in place of seqlen_q.
            lists: 1 for all heads, heads_kv, or heads_q.
        granularity: keys of a block: 1 or more.
        per: whether each query has a list, or each block of `granularity` queries.
        counts: int32, like indices without the last axis: entries of a list from here on are not read.
        causal: a query attends to no key after its own position; positions are aligned at the end, as in
            `fa4.flash_attn_func`.
        window: each query also attends to its own position and the `window` keys before it; None for no window.
        sink: (heads_q,), a logit of each query head that adds to the softmax's denominator.
        softmax_scale: None means 1 / sqrt(head_dim).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of packed sequences, as in
            `fa4.flash_attn_varlen_func`.
        seqused_k: (batch,) int32, keys of each sequence, from its first; without cu_seqlens_k.
        page_table: (batch, pages of a sequence) int32, see `fa4.flash_attn_with_kvcache`; no gradients.
        deterministic: gradients are bitwise repeatable. None means torch.are_deterministic_algorithms_enabled().
        return_lse: also return the log-sum-exp of each row's logits.
        backend: as in `fa4.flash_attn_func`.

    Values of indices and counts are checked on a CPU; on other devices only with FA4_CHECK_LENGTHS=1, which
    synchronises.

    Returns:
        out like q with head_dim_v columns and, with return_lse, lse (batch, heads_q, seqlen_q), packed (heads_q,
        total_q). A query without keys has out 0, and lse -inf or the sink.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.
        NotImplementedError: an argument requires grad and there is a page table.
    """
    t = checks.Tensors(q, k, v, indices, counts, sink, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table)
    rule = checks.rule(granularity, causal, window)
    return_lse = common.boolean("return_lse", return_lse, "a bool")
    options = common.Options(softmax_scale, causal, (None, None), 0.0, deterministic, backend)
    sizes, flags = checks.check(t, rule, per, (max_seqlen_q, max_seqlen_k), options)
    if per == "block" and page_table is None and rule.granularity >= NARROWEST_BLOCK:
        out, lse = _by_blocks(t, rule, sizes, options, flags.needs_backward)
        return (out, lse) if return_lse else out
    layout = Layout(
        *sizes, cu_seqlens_q, cu_seqlens_k, seqused_k, page_table, None if page_table is None else k.shape[1]
    )
    if per == "block":
        t = _of_tokens(t, rule, layout)
    tokens, lists, n = math.prod(q.shape[:-2]), indices.shape[-2], indices.shape[-1]
    counts = None if t.counts is None else t.counts.reshape(tokens, lists)
    pattern = attend.Pattern(t.indices.reshape(tokens, lists, n), counts, rule, layout)
    out, lse = attend.attend(
        q.reshape(tokens, *q.shape[-2:]), k.reshape(-1, *k.shape[-2:]), v.reshape(-1, *v.shape[-2:]), sink, pattern,
        flags._replace(window_right=None, needs_backward=True),
    )  # fmt: skip
    out, lse = out.reshape(*q.shape[:-1], v.shape[-1]), lse.reshape(q.shape[:-1]).transpose(-1, -2)
    return (out, lse) if return_lse else out


def _by_blocks(
    t: checks.Tensors, rule: Rule, sizes: checks.Sizes, options: common.Options, needs_backward: bool
) -> tuple[Tensor, Tensor]:
    """Return out and lse by a block mask: a tile holds the queries of a block."""
    if t.cu_seqlens_q is not None and t.cu_seqlens_k is not None:
        shift: Tensor | int = t.cu_seqlens_k.diff() - t.cu_seqlens_q.diff()
    else:
        shift = sizes.keys - sizes.queries if t.seqused_k is None else t.seqused_k - sizes.queries
    mask = blocks.block_mask(t.indices, t.counts, rule, t.q.shape[-2], sizes[1:], shift, needs_backward)
    arguments = options._asdict() | dict(causal=False, block_mask=mask, learnable_sink=t.sink, return_lse=True)
    if t.cu_seqlens_q is None:
        return flash_attn_func(t.q, t.k, t.v, seqused_k=t.seqused_k, **arguments)
    arguments |= dict(cu_seqlens_q=t.cu_seqlens_q, cu_seqlens_k=t.cu_seqlens_k)
    return flash_attn_varlen_func(t.q, t.k, t.v, max_seqlen_q=sizes.queries, max_seqlen_k=sizes.keys, **arguments)


def _of_tokens(t: checks.Tensors, rule: Rule, layout: Layout) -> checks.Tensors:
    """Give each query the list of its block."""
    places = Places.of(layout, 0, math.prod(t.q.shape[:-2]), t.q.device)
    block = (places.query // rule.granularity).clamp(max=max(t.indices.shape[1] - 1, 0))  # of unused rows: any
    counts = None if t.counts is None else t.counts[places.sequence, block]
    return t._replace(indices=t.indices[places.sequence, block], counts=counts)
