"""flash-attn 2's functions on fa4: `from fa4.compat.flash_attn import flash_attn_func` replaces `from flash_attn`.

Positional order, defaults and meaning of the arguments are flash-attn's, except:

    dropout_p          drops other pairs than flash-attn; seeds also come from torch's generator
    alibi_slopes       (heads_q,) or (batch, heads_q), implemented as a score_mod
    deterministic      False follows torch.use_deterministic_algorithms
    return_attn_probs  returns (out, lse, None): probabilities are never in memory; see `fa4.dropout_mask`
    block_table        must be None, except for `flash_attn_with_kvcache`, where pages may have any number of rows

float32, float64, any head dim and CPUs are supported as in `fa4.flash_attn_func`; errors are fa4's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..api.dense import flash_attn_func as _dense
from ..api.dense import flash_attn_varlen_func as _varlen
from ..kvcache import flash_attn_with_kvcache as _with_kvcache
from ..mods.ir.ready import ReadyMade
from ..runtime.spec import compute_dtype
from ..torch_ops import checks, jagged

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
Result: TypeAlias = Tensor | tuple[Tensor, Tensor, None]


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
    """Attention of q (batch, seqlen_q, heads_q, head_dim), k and v (batch, seqlen_k, heads_kv, head_dim)."""
    options: dict[str, Any] = dict(
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=checks.boolean("deterministic", deterministic, "a bool") or None,
    )  # fmt: skip
    if alibi_slopes is not None:
        _check_axes(4, q=q, k=k)
        lengths_q, lengths_k = _lengths(q), _lengths(k)
        options |= _alibi(alibi_slopes, q.shape[0], q, lengths_k - lengths_q, softcap)
    with_probs = checks.boolean("return_attn_probs", return_attn_probs, "a bool")
    return _result(_dense(q, k, v, return_lse=True, **options), with_probs)


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
    k, v = _unbind("kv", kv, 2, 5)
    return _with_caller_names(
        {"k": "kv[:, :, 0]", "v": "kv[:, :, 1]"}, flash_attn_func, q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


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
    q, k, v = _unbind("qkv", qkv, 3, 5)
    return _with_caller_names(
        {x: f"qkv[:, :, {i}]" for i, x in enumerate("qkv")}, flash_attn_func, q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


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
    """Packed q (total_q, heads_q, head_dim), k, v (total_k, heads_kv, head_dim), cu_seqlens (batch + 1,) int32."""
    if block_table is not None:
        raise NotImplementedError("block_table is given, expected None: fa4.flash_attn_with_kvcache reads pages")
    options: dict[str, Any] = dict(
        dropout_p=dropout_p, softmax_scale=softmax_scale, causal=causal, window_size=window_size, softcap=softcap,
        deterministic=checks.boolean("deterministic", deterministic, "a bool") or None,
    )  # fmt: skip
    if alibi_slopes is not None:
        _check_axes(3, q=q)
        bounds = checks.check_int32("cu_seqlens_q", cu_seqlens_q, q, None).shape[0]
        checks.check_int32("cu_seqlens_k", cu_seqlens_k, q, bounds)
        options |= _alibi(alibi_slopes, bounds - 1, q, cu_seqlens_k.diff() - cu_seqlens_q.diff(), softcap)
    options |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    with_probs = checks.boolean("return_attn_probs", return_attn_probs, "a bool")
    return _result(_varlen(q, k, v, return_lse=True, **options), with_probs)


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
    k, v = _unbind("kv", kv, 2, 4)
    return _with_caller_names(
        {"k": "kv[:, 0]", "v": "kv[:, 1]"}, flash_attn_varlen_func,
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
    q, k, v = _unbind("qkv", qkv, 3, 4)
    names = {x: f"qkv[:, {i}]" for i, x in enumerate("qkv")}
    names |= {f"{x}_{side}": x for x in ("cu_seqlens", "max_seqlen") for side in "qk"}
    return _with_caller_names(
        names, flash_attn_varlen_func,
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (batch, seqlen_q, heads_q, head_dim) on k_cache, v_cache (batch, rows, heads_kv, head_dim), with
    block_table (pages, page rows, heads_kv, head_dim). No gradients; see `fa4.flash_attn_with_kvcache`."""
    options: dict[str, Any] = {"softcap": softcap}
    if alibi_slopes is not None:
        shift = _cache_lengths(q, k_cache, k, cache_seqlens, cache_leftpad, block_table) - q.shape[1]
        options = _alibi(alibi_slopes, q.shape[0], q, shift, softcap)
        if torch.is_grad_enabled() and alibi_slopes.requires_grad:
            raise NotImplementedError("alibi_slopes requires grad, and flash_attn_with_kvcache has no gradients")
    out: Tensor | tuple[Tensor, Tensor] = _with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table,
        softmax_scale=softmax_scale, causal=causal, window_size=window_size, rotary_interleaved=rotary_interleaved,
        num_splits=num_splits, return_lse=checks.boolean("return_softmax_lse", return_softmax_lse, "a bool"), **options,
    )  # fmt: skip
    return out


def _with_caller_names(names: dict[str, str], function: Callable[..., Result], *arguments: Any) -> Result:
    """Return function(*arguments). Errors name the caller's arguments. names: fa4's names to the caller's."""
    try:
        return function(*arguments)
    except (TypeError, ValueError, NotImplementedError) as error:
        text = re.sub(r"(?<![\w.])[a-z]\w*(?!\w)", lambda match: names.get(match[0], match[0]), str(error))
        raise type(error)(text) from error


def _result(out_and_lse: tuple[Tensor, Tensor], return_attn_probs: bool) -> Result:
    out, lse = out_and_lse
    return (out, lse, None) if return_attn_probs else out


def _unbind(name: str, packed: Tensor, parts: int, ndim: int) -> tuple[Tensor, ...]:
    if isinstance(packed, Tensor) and packed.is_nested:
        raise TypeError(f"{name} is a nested tensor, expected a plain one")
    if not isinstance(packed, Tensor) or packed.ndim != ndim or packed.shape[-3] != parts:
        shown = tuple(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        rows = "batch, seqlen" if ndim == 5 else "total"
        raise ValueError(f"{name} is {shown}, expected a tensor of shape ({rows}, {parts}, heads, head_dim)")
    return packed.unbind(-3)


def _check_axes(ndim: int, **tensors: Tensor) -> torch.Size:
    """Raise unless all are tensors of `ndim` axes; return the shape of the last one."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor")
        if x.is_nested and x.layout is not torch.jagged:
            raise TypeError(f"{name} is a nested tensor of layout {x.layout}, expected torch.jagged")
        if x.ndim != ndim:
            raise ValueError(f"{name} has {x.ndim} dimensions, shape {checks.shown(x)}, expected {ndim}")
    return x.shape


def _lengths(x: Any) -> Any:
    """Return the rows of each sequence: an int for a dense tensor, (batch,) for a jagged one."""
    if not jagged.is_jagged((x,)):
        return x.shape[1]
    return x.offsets().diff() if x.lengths() is None else x.lengths()


def _cache_lengths(
    q: Tensor,
    k_cache: Tensor,
    k: Tensor | None,
    cache_seqlens: int | Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
) -> Any:
    """Return the keys of each sequence, including the new ones: an int or (batch,)."""
    _check_axes(4, q=q, k_cache=k_cache, **({} if k is None else {"k": k}))
    keys: Any = k_cache.shape[1]
    if block_table is not None:
        keys = keys * _check_axes(2, block_table=block_table)[1]
    if isinstance(cache_seqlens, Tensor):
        keys = checks.check_int32("cache_seqlens", cache_seqlens, q, q.shape[0])
    elif cache_seqlens is not None:
        keys = checks.count("cache_seqlens", cache_seqlens)
    if cache_seqlens is not None and k is not None:
        keys = keys + k.shape[1]
    return keys if cache_leftpad is None else keys - checks.check_int32("cache_leftpad", cache_leftpad, q, q.shape[0])


def _alibi(slopes: Tensor, batch: int, q: Tensor, shift: Any, softcap: float) -> dict[str, Any]:
    """Return options with the score_mod of slopes: it adds -slope * |i + shift - j| to the scores after the softcap.
    shift: keys minus queries of a sequence, an int or (batch,)."""
    heads = q.shape[-2]
    if not isinstance(slopes, Tensor) or slopes.is_nested or tuple(slopes.shape) not in ((heads,), (batch, heads)):
        is_plain = isinstance(slopes, Tensor) and not slopes.is_nested
        shown = tuple(slopes.shape) if is_plain else type(slopes).__name__
        raise ValueError(f"alibi_slopes is {shown}, expected a tensor of shape ({heads},) or ({batch}, {heads})")
    if not slopes.dtype.is_floating_point or slopes.layout is not torch.strided:
        raise TypeError(f"alibi_slopes is {slopes.dtype}, {slopes.layout}, expected a floating dtype, torch.strided")
    if slopes.device != q.device:
        raise ValueError(f"alibi_slopes is on {slopes.device}, expected {q.device} like q")
    cap: Any = checks.cap("softcap", softcap) or None
    if torch.compiler.is_compiling():  # numbers would become constants of the compiled code
        if not isinstance(shift, Tensor):
            shift = torch.full((), shift, dtype=torch.int32, device=q.device)
        if cap is not None:
            cap = torch.full((), cap, dtype=compute_dtype(q.dtype), device=q.device)
    if isinstance(shift, Tensor):
        shift = shift.to(torch.int32)
    return {"score_mod": _Alibi(slopes, shift, cap), "softcap": 0.0}


class _Alibi(ReadyMade):
    """ALiBi. slopes: (heads_q,) or (batch, heads_q). shift: an int or (batch,). cap: the softcap before it, or None."""

    slopes: Tensor
    shift: int | Tensor
    cap: float | Tensor | None

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if self.cap is not None:
            score = self.cap * torch.tanh(score / self.cap)
        offset = self.shift[b] if isinstance(self.shift, Tensor) and self.shift.ndim else self.shift
        slope = self.slopes[h] if self.slopes.ndim == 1 else self.slopes[b, h]
        return score - slope * (q_idx + offset - kv_idx).abs()
