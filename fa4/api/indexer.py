"""Lightning indexer (DeepSeek-V3.2): scores of keys, exact top-k of them, and the loss that trains the indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..indexer import arguments, backends, loss, run
from ..indexer.arguments import Lengths
from ..torch_ops import checks


def indexer_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    *,
    causal: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute the indexer's score of every query t and key s, over heads h that share one key head:

            scores[t, s] = k_descale[s] * sum over h of weights[t, h] * q_descale[t, h] * relu(q[t, h] . k[s])

    Differentiable in q, k and weights, except for e4m3 tensors and pages.

    Args:
        q: (batch, seqlen_q, heads, head_dim); packed, (total_q, heads, head_dim). bf16, fp16, e4m3, fp32 or fp64.
        k: (batch, seqlen_k, head_dim); packed, (total_k, head_dim); with page_table, (pages, page_size, head_dim).
        weights: (batch, seqlen_q, heads) or (total_q, heads). float32, or the dtype of a q of 16 bits; float32 or
            float64 for fp64. A softmax scale is part of them.
        causal: aligned bottom-right, as in `fa4.flash_attn_func`.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 of packed sequences. With pages, cu_seqlens_q alone packs q.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths, with cu_seqlens_q, and with cu_seqlens_k or page_table.
            max_seqlen_k is the number of columns of the result; by default total_k, or the rows of all pages of a
            sequence.
        page_table: (batch, pages of a sequence) int32, the pages in k of each sequence.
        seqused_k: (batch,) int32, keys in use of each sequence; required with page_table.
        q_descale, k_descale: float32 factors of e4m3 q and k: one element, or the shape of q or k without its last
            axis.
        backend: "auto", or the name of a backend, which then serves the call or raises.

    Returns:
        (batch, seqlen_q, seqlen_k), or (total_q, max_seqlen_k) for packed q. Column s is key s of the row's own
        sequence. float32, or float64 for fp64; -inf where the row does not see the key.

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape, device or value.
        NoBackend: the named backend cannot serve the call.
        NotImplementedError: e4m3 tensors or pages require gradients.
    """
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table, seqused_k)
    problem = arguments.problem(q, k, weights, causal, lengths, q_descale, k_descale)
    out = run.scores(problem, backend, arguments.needs_gradients(q, k, weights, page_table))
    return out if cu_seqlens_q is not None else out.unflatten(0, q.shape[:2])


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    *,
    causal: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    page_table: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    return_scores: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the keys with the `topk` largest scores of each query, exactly, without the matrix of all scores.

    Of equal scores, those of smaller index are chosen. -0.0 equals 0.0. NaN comes before all numbers. So the result is
    a function of the scores. The scores are those of `indexer_scores`, computed for some queries at a time: with the
    kernel bit by bit, with torch up to the rounding of its matrix product.

    Args:
        topk: number of keys, 0 or more.
        return_scores: also return the scores of the chosen keys. They have no gradients.
        Others: as in `indexer_scores`.

    Returns:
        indices, (batch, seqlen_q, topk) or (total_q, topk) int32: keys of the query's own sequence in ascending order,
        then -1 if it sees fewer. With return_scores, also their scores, -inf where the index is -1.

    Raises:
        TypeError, ValueError, NoBackend: as `indexer_scores`.
        NotImplementedError: return_scores with tensors that require gradients.
    """
    checks.count("topk", topk)
    checks.boolean("return_scores", return_scores, "a bool")
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, page_table, seqused_k)
    has_grad = torch.is_grad_enabled()
    with torch.no_grad():
        problem = arguments.problem(q, k, weights, causal, lengths, q_descale, k_descale)
        if return_scores and has_grad and any(x.requires_grad for x in (q, k, weights)):
            raise NotImplementedError("return_scores is True with tensors that require grad: scores have no gradients")
        indices, scores = run.topk(problem, topk, return_scores, backend)
    if cu_seqlens_q is None:
        indices = indices.unflatten(0, q.shape[:2])
        scores = None if scores is None else scores.unflatten(0, q.shape[:2])
    return indices if scores is None else (indices, scores)


def indexer_loss(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    attn_q: Tensor,
    attn_k: Tensor,
    attn_lse: Tensor,
    *,
    indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_k: Tensor | None = None,
    reduction: str = "mean",
    backend: str = "auto",
) -> Tensor:
    """Compute the KL divergence from the attention's distribution p to softmax(scores), for each query.

    p is the attention's softmax, summed over its heads and divided by its sum over the keys. It is recomputed in tiles
    from the attention's queries, keys and log-sum-exp. Memory grows with queries plus keys, not with their product.
    Differentiable in q, k and weights. The attention is the target: its tensors get no gradients from here.

    Args:
        q, k, weights: as in `indexer_scores`, but neither e4m3 nor pages.
        attn_q, attn_k: queries and keys of the attention, (batch, seqlen, heads, dim) or packed, with the lengths of q
            and k. Heads of attn_q: a multiple of those of attn_k.
        attn_lse: log-sum-exp of its scaled logits, as `fa4.flash_attn_func` returns it: (batch, heads, seqlen_q), or
            packed (heads, total_q). Of dense or of sparse attention.
        indices: int32 keys of each query, as `indexer_topk` returns them: both distributions are then over these keys.
            Without: over all visible keys. Negative ones, and those that the query does not see, are left out. An
            index may occur once in a row.
        softmax_scale: of the attention; by default 1 / sqrt(dim).
        reduction: "mean" over the queries that see a key, "sum", or "none" for the loss of each query, (batch,
            seqlen_q) or (total_q,).
        Others: as in `indexer_scores`.

    Returns:
        The loss in float32, or float64 for fp64. A query without keys has loss 0.

    Raises:
        TypeError, ValueError, NoBackend: as `indexer_scores`.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}, expected 'mean', 'sum' or 'none'")
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, None, seqused_k)
    problem = arguments.problem(q, k, weights, causal, lengths, dtypes=checks.DTYPES)
    target = arguments.target(problem, q, k, attn_q, attn_k, attn_lse, softmax_scale, indices)
    backends.check_torch(backend, "a loss of the indexer")
    of_rows, is_used = loss.of_rows(problem, target)
    if reduction == "none":
        return of_rows if cu_seqlens_q is not None else of_rows.unflatten(0, q.shape[:2])
    total = of_rows.sum()
    return total if reduction == "sum" else total / is_used.sum().clamp(min=1)
