"""flash-attn 2's functions on fa4: `from fa4.compat.flash_attn import flash_attn_func` in place of `from flash_attn`.

Positional order and defaults are flash-attn's. Arguments mean here what they mean there, except:

    dropout_p          other pairs are dropped than flash-attn drops; seeds come from torch's generator, too
    alibi_slopes       (heads_q,) or (batch, heads_q), a score_mod here
    deterministic      False follows torch.use_deterministic_algorithms
    return_attn_probs  gives (out, lse, None): probabilities are never in memory; see `fa4.dropout_mask`
    block_table        None only; `flash_attn_with_kvcache` reads pages

What `fa4.flash_attn_func` serves besides (float32, float64, any head dim, CPUs) is served; errors are its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..api import flash_attn_func as _dense
from ..api import flash_attn_varlen_func as _packed
from ..kvcache import flash_attn_with_kvcache
from ..mods.call import ScoreMod

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
WindowSize = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, head_dim); see above."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, q.shape[0], q.shape[2])
        options |= _alibi(alibi_slopes, k.shape[1] - q.shape[1], softcap)
    return _result(_dense(q, k, v, return_lse=True, **options), return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with kv (batch, seqlen_k, 2, heads_kv, head_dim)."""
    k, v = _parts("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` with qkv (batch, seqlen, 3, heads, head_dim)."""
    q, k, v = _parts("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """q (total_q, heads_q, head_dim), k and v (total_k, heads_kv, head_dim), cu_seqlens (batch + 1,) int32."""
    if block_table is not None:
        raise NotImplementedError("block_table is given, expected None: fa4.flash_attn_with_kvcache reads pages")
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, cu_seqlens_q.shape[0] - 1, q.shape[1])
        options |= _alibi(alibi_slopes, cu_seqlens_k.diff() - cu_seqlens_q.diff(), softcap)
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    return _result(_packed(q, k, v, return_lse=True, **options), return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with kv (total_k, 2, heads_kv, head_dim)."""
    k, v = _parts("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` with qkv (total, 3, heads, head_dim)."""
    q, k, v = _parts("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: WindowSize,
    softcap: float,
    deterministic: bool,
) -> dict[str, Any]:
    return {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "deterministic": deterministic or None,
    }


def _result(out_and_lse: tuple[Tensor, Tensor], return_attn_probs: bool) -> Result:
    out, lse = out_and_lse
    return (out, lse, None) if return_attn_probs else out


def _parts(name: str, packed: Tensor, parts: int, ndim: int) -> tuple[Tensor, ...]:
    if not isinstance(packed, Tensor) or packed.ndim != ndim or packed.shape[-3] != parts:
        came = tuple(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        rows = "batch, seqlen" if ndim == 5 else "total"
        raise ValueError(f"{name} is {came}, expected a tensor of shape ({rows}, {parts}, heads, head_dim)")
    return packed.unbind(-3)


def _check_slopes(slopes: Tensor, batch: int, heads: int) -> None:
    if not isinstance(slopes, Tensor) or tuple(slopes.shape) not in ((heads,), (batch, heads)):
        came = tuple(slopes.shape) if isinstance(slopes, Tensor) else type(slopes).__name__
        raise ValueError(f"alibi_slopes is {came}, expected a tensor of shape ({heads},) or ({batch}, {heads})")


def _alibi(slopes: Tensor, shift: int | Tensor, softcap: float) -> dict[str, Any]:
    """-slope * |i + shift - j| added to the scores, behind the softcap; shift is seqlen_k - seqlen_q, of each sequence
    where they differ."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        offset = shift[b] if isinstance(shift, Tensor) else shift
        slope = slopes[h] if slopes.ndim == 1 else slopes[b, h]
        return score - slope * (q_idx + offset - kv_idx).abs()

    chosen: ScoreMod = score_mod
    return {"score_mod": chosen, "softcap": 0.0}
