"""Latent attention (MLA) on absorbed queries: one key/value head, whose values are columns of its keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..torch_ops import latent as arguments
from .dense import flash_attn_func, flash_attn_varlen_func


def mla_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    latent: Tensor,
    k_rope: Tensor,
    *,
    softmax_scale: float,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    causal: bool = False,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute multi-head latent attention on absorbed queries, as in DeepSeek-V2 and its successors:

            logits = softmax_scale * (q_nope latent^T + q_rope k_rope^T),   out = softmax(logits) latent

    All heads share the keys [latent, k_rope] and the values latent. The caller multiplies queries by the key part of
    the up-projection before, and out by its value part after. Differentiable in all four tensors. Kernels take up to
    576 columns.

    Args:
        q_nope: (batch, seqlen_q, heads, latent_dim); packed, (total_q, heads, latent_dim). fp16, bf16, fp32 or fp64.
        q_rope: the same with rope_dim columns, rotated.
        latent: (batch, seqlen_k, latent_dim), the compressed keys and values; packed, (total_k, latent_dim).
        k_rope: the same with rope_dim columns, rotated.
        softmax_scale: factor on the logits; required, because it follows from the head_dim before absorption:
            1 / sqrt(192) for 128 + 64 columns.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 of packed sequences; both or none. max_seqlen_q, max_seqlen_k: as
            in `fa4.flash_attn_varlen_func`, with them only.
        causal: aligned bottom-right, as in `fa4.flash_attn_func`.
        return_lse: also return the log-sum-exp of each row's logits.
        options: further keywords of `fa4.flash_attn_func`, or of `fa4.flash_attn_varlen_func` for packed sequences.

    Returns:
        out like q_nope and, with return_lse, lse (batch, heads, seqlen_q), packed (heads, total_q).

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device; those of `fa4.flash_attn_func`.

    A prompt needs no absorption: `fa4.flash_attn_func` with head dims (192, 128), in chunks by `fa4.merge_states`.
    """
    arguments.check_scale(softmax_scale)
    packed = cu_seqlens_q is not None
    if packed != (cu_seqlens_k is not None):
        given, missing = ("cu_seqlens_q", "cu_seqlens_k") if packed else ("cu_seqlens_k", "cu_seqlens_q")
        raise ValueError(f"{given} is given without {missing}, expected both or none")
    rows_q, rows_k = ("total_q, heads", "total_k") if packed else ("batch, seqlen_q, heads", "batch, seqlen_k")
    arguments.check_pair(("q_nope", "q_rope"), q_nope, q_rope, q_nope, rows_q)
    arguments.check_pair(("latent", "k_rope"), latent, k_rope, q_nope, rows_k)
    arguments.check_widths(q_nope, q_rope, latent, k_rope)
    q, k = arguments.join(q_nope, q_rope), arguments.join(latent, k_rope).unsqueeze(-2)
    options |= dict(softmax_scale=softmax_scale, causal=causal, return_lse=return_lse)
    v = latent.unsqueeze(-2)
    if not packed:
        for name, bound in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if bound is not None:
                raise ValueError(f"{name} is given without cu_seqlens_q and cu_seqlens_k")
        return flash_attn_func(q, k, v, **options)
    options |= dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    return flash_attn_varlen_func(q, k, v, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **options)
