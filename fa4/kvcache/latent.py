"""Latent attention (MLA) on a cache of joined latents and rotated keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime import nvfp4, scaled_rows
from ..runtime.spec import BYTES
from ..torch_ops import checks
from ..torch_ops import latent as arguments
from .api import flash_attn_with_kvcache


def mla_attention_with_kvcache(
    q_nope: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    latent: Tensor | None = None,
    k_rope: Tensor | None = None,
    *,
    softmax_scale: float,
    causal: bool = False,
    kv_descale: Tensor | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `fa4.mla_attention` on a cache, after appending new rows if there are any. No gradients.

    Args:
        q_nope: (batch, seqlen_q, heads, latent_dim), absorbed; with cu_seqlens_q packed, (total_q, heads, latent_dim).
        q_rope: the same with rope_dim columns, rotated.
        kv_cache: (batch, rows, latent_dim + rope_dim), or with page_table (pages, rows of a page, latent_dim +
            rope_dim), an axis of one head before the last is allowed; q_nope's dtype, or float8_e4m3fn or int8. A row
            is [latent, k_rope]. Or rows of 656 bytes, any 8-bit dtype, for 512 and 64 columns and bfloat16: 512 e4m3,
            four float32 factors of 128 columns each, 64 bfloat16, as FlashMLA and vLLM (fp8_ds_mla) store them.
        latent, k_rope: (batch, new rows, latent_dim or rope_dim) in q_nope's dtype, rotated: rows to write from row
            cache_seqlens[b] on. With cu_seqlens_k_new packed. The factor of 128 columns in a row of 656 bytes is their
            largest magnitude / 448.
        softmax_scale: as in `fa4.mla_attention`, required.
        causal: aligned bottom-right.
        kv_descale: float32 factor on 8-bit rows, other than those of 656 bytes: one, (1,) or (batch, 1).
        return_lse: also return the log-sum-exp of each row's logits, for parts of a context on several ranks.
        options: further keywords of `fa4.flash_attn_with_kvcache`: cache_seqlens, page_table, cu_seqlens_q, num_splits,
            batch_invariant, out_descale and others, but rotary_cos, rotary_sin, q_descale, k_descale and v_descale.

    Returns:
        out like q_nope and, with return_lse, lse (batch, heads, seqlen_q), packed (heads, total_q).

    Raises:
        TypeError, ValueError: an argument has the wrong type, dtype, shape or device; those of
            `fa4.flash_attn_with_kvcache`.
    """
    arguments.check_scale(softmax_scale)
    others = dict.fromkeys(("rotary_cos", "rotary_sin"), "rotated q_rope and k_rope")
    others |= dict.fromkeys(("k_descale", "v_descale"), "kv_descale") | {"q_descale": "q_nope and q_rope of 16 bits"}
    for name, other in others.items():
        if options.get(name) is not None:
            raise TypeError(f"{name} is no argument of mla_attention_with_kvcache, expected {other}")
    packed = options.get("cu_seqlens_q") is not None
    rows_q = "total_q, heads" if packed else "batch, seqlen_q, heads"
    arguments.check_pair(("q_nope", "q_rope"), q_nope, q_rope, q_nope, rows_q)
    checks.check_plain("kv_cache", kv_cache, q_nope, like="q_nope")
    columns = q_nope.shape[-1] + q_rope.shape[-1]
    if kv_cache.ndim == 4 and kv_cache.shape[-2] == 1:
        kv_cache = kv_cache.squeeze(-2)
    if kv_cache.dtype is nvfp4.DTYPE:
        raise TypeError(
            f"kv_cache has dtype {nvfp4.DTYPE}, expected {q_nope.dtype} or 8 bits: a row would have scales of its own"
        )
    is_bytes = kv_cache.dtype in (*BYTES, scaled_rows.DTYPE)
    has_scaled_rows = is_bytes and kv_cache.shape[-1:] == (scaled_rows.BYTES_OF_ROW,)
    if has_scaled_rows:
        _check_scaled_rows(q_nope, q_rope, kv_descale)
        kv_cache = kv_cache.view(scaled_rows.DTYPE)
    if kv_cache.ndim != 3 or not (has_scaled_rows or kv_cache.shape[-1] == columns):
        raise ValueError(
            f"kv_cache has shape {checks.shown(kv_cache)}, expected (batch, rows, {columns}), or pages: "
            "latent_dim + rope_dim columns of q_nope and q_rope"
        )
    k = v = None
    if (latent is None) != (k_rope is None):
        raise ValueError("latent and k_rope are not both given, expected both or none")
    if latent is not None and k_rope is not None:
        rows = "total new rows" if options.get("cu_seqlens_k_new") is not None else "batch, new rows"
        arguments.check_pair(("latent", "k_rope"), latent, k_rope, q_nope, rows)
        arguments.check_widths(q_nope, q_rope, latent, k_rope)
        k, v = arguments.join(latent, k_rope).unsqueeze(-2), latent.unsqueeze(-2)
    keys = kv_cache.unsqueeze(-2)
    options |= dict(softmax_scale=softmax_scale, causal=causal, return_lse=return_lse)
    options |= dict(k_descale=kv_descale, v_descale=kv_descale)
    q = arguments.join(q_nope, q_rope)
    return flash_attn_with_kvcache(q, keys, keys[..., : q_nope.shape[-1]], k, v, **options)


def _check_scaled_rows(q_nope: Tensor, q_rope: Tensor, kv_descale: Tensor | None) -> None:
    """Check what goes with a cache of 656-byte rows."""
    rows = f"kv_cache has rows of {scaled_rows.BYTES_OF_ROW} bytes"
    if q_nope.dtype != torch.bfloat16:
        raise TypeError(f"q_nope has dtype {q_nope.dtype}, expected torch.bfloat16: {rows}")
    for name, x, expected in (("q_nope", q_nope, scaled_rows.LATENT), ("q_rope", q_rope, scaled_rows.ROPE)):
        if x.shape[-1] != expected:
            raise ValueError(f"{name} has {x.shape[-1]} columns, expected {expected}: {rows}")
    if kv_descale is not None:
        raise ValueError(f"kv_descale is given, expected None: {rows}, with factors of their own")
