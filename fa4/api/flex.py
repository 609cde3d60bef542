"""torch.nn.attention.flex_attention's signature and layout, on fa4's backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..mods.frontend.call import ScoreMod
from ..runtime.torch_internals import autocast_anywhere
from ..torch_ops import checks, jagged
from .dense import flash_attn_func

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Any:
    """Call `flash_attn_func` with the signature of torch.nn.attention.flex_attention.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim).
        key: (batch, heads_kv, seqlen_k, head_dim).
        value: (batch, heads_kv, seqlen_k, head_dim_v).
        score_mod, block_mask: see `flash_attn_func`. For a mask_mod, use `fa4.create_block_mask`.
        scale: factor on the scores; None means 1 / sqrt(head_dim).
        enable_gqa: allow more query heads than key/value heads.
        return_lse: also return the log-sum-exp, (batch, heads_q, seqlen_q).
        kernel_options: None or {}: these are options of torch's own kernels.
        return_aux: torch's AuxRequest; then (out, AuxOutput) is returned.

    Returns:
        out (batch, heads_q, seqlen_q, head_dim_v), alone or with the other requested results.

    Raises:
        TypeError, ValueError: as `flash_attn_func`, or heads differ without enable_gqa.
        NotImplementedError: max_scores are requested.
    """
    _check(query, key, value, enable_gqa)
    if kernel_options:
        raise ValueError(
            f"kernel_options is {kernel_options!r}, expected None or {{}}: they are for torch's own kernels"
        )
    if return_aux is not None:
        if return_lse:
            raise ValueError("return_lse and return_aux are both given, expected one")
        if not hasattr(return_aux, "lse"):
            raise TypeError(f"return_aux is {return_aux!r}, expected torch's AuxRequest")
        if getattr(return_aux, "max_scores", False):
            raise NotImplementedError("return_aux asks for max_scores, expected lse at most")
    scale = None if scale is None else checks.number("scale", scale)
    checks.boolean("return_lse", return_lse, "a bool")
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if query.layout is torch.strided and not torch.compiler.is_compiling():
        checks.warn_of_axes(q, k, by_flex=True)
    out, lse = flash_attn_func(
        q,
        k,
        v,
        softmax_scale=scale,
        score_mod=score_mod,
        block_mask=block_mask,
        deterministic=deterministic,
        return_lse=True,
        backend=backend,
    )
    out = out.transpose(1, 2)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _check(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    """Check what `flash_attn_func` requires of q, k and v, with the names and axes used here."""
    tensors = ("query", query), ("key", key), ("value", value)
    for name, x in tensors:
        _check_layout(name, x)
    for name, x in tensors:
        if x.layout is not query.layout:
            raise TypeError(f"{name} has layout {x.layout}, expected {query.layout} like query")
        checks.check_like(name, x, query, "query", any_dtype=autocast_anywhere())
    batch, heads, _, head_dim = query.shape
    if key.shape[0] != batch or key.shape[3] != head_dim:
        reason = f"to go with query {checks.shown(query)}"
        raise ValueError(f"key has shape {checks.shown(key)}, expected ({batch}, *, *, {head_dim}) {reason}")
    row_axes = 3 if key.layout is torch.strided else 2
    if value.shape[:row_axes] != key.shape[:row_axes]:
        reason_v = f"to go with key {checks.shown(key)}"
        raise ValueError(f"value has shape {checks.shown(value)}, expected {checks.shown(key, 3, '*')} {reason_v}")
    if key.layout is torch.jagged:
        jagged.check_same_lengths("key", key, "value", value)
    heads_kv = key.shape[1]
    if not checks.boolean("enable_gqa", enable_gqa, "a bool") and heads != heads_kv:
        raise ValueError(f"query has {heads} heads, expected {heads_kv} like key: pass enable_gqa=True for groups")
    if heads == 0 or heads_kv == 0 or heads % heads_kv:
        raise ValueError(f"query has {heads} heads, expected a positive multiple of key's {heads_kv}")


def _check_layout(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor")
    if x.is_nested and x.layout is not torch.jagged:
        raise TypeError(f"{name} is a nested tensor of layout {x.layout}, expected torch.jagged")
    if x.layout not in (torch.strided, torch.jagged):
        raise TypeError(f"{name} has layout {x.layout}, expected torch.strided, or torch.jagged for nested tensors")
    if x.ndim != 4:
        raise ValueError(f"{name} has shape {checks.shown(x)}, expected 4 axes: (batch, heads, seqlen, head_dim)")
    if x.layout is torch.jagged and getattr(x, "_ragged_idx", 2) != 2:
        axes = "(batch, heads, lengths, head_dim): transpose(1, 2) of (batch, lengths, heads, head_dim)"
        raise ValueError(f"{name} has shape {checks.shown(x)}, expected {axes}")
