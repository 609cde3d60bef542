"""torch.nn.attention.flex_attention's signature and layout, on fa4's backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .api import flash_attn_func
from .mods.call import ScoreMod

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
    """`flash_attn_func` as torch.nn.attention.flex_attention is called.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim).
        key: (batch, heads_kv, seqlen_k, head_dim).
        value: (batch, heads_kv, seqlen_k, head_dim_v).
        score_mod, block_mask: see `flash_attn_func`. There is no mask_mod here: `fa4.create_block_mask` takes one.
        scale: factor on the scores; None means 1 / sqrt(head_dim).
        enable_gqa: allow more query heads than key/value heads.
        return_lse: also return the log-sum-exp, (batch, heads_q, seqlen_q).
        kernel_options: must be None; they are options of torch's own kernels.
        return_aux: torch's AuxRequest; then (out, AuxOutput) is returned.

    Returns:
        out (batch, heads_q, seqlen_q, head_dim_v), alone or with what else was asked for.

    Raises:
        ValueError: as `flash_attn_func`, or heads differ without enable_gqa.
        NotImplementedError: max_scores are asked for.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor) or x.ndim != 4:
            raise ValueError(f"{name} must be a tensor of 4 dimensions: (batch, heads, seqlen, head_dim)")
    if kernel_options is not None:
        raise ValueError(f"kernel_options is {kernel_options!r}, expected None: they are for torch's own kernels")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} heads, expected {key.shape[1]} like key: pass enable_gqa=True for groups"
        )
    if return_aux is not None and (return_lse or getattr(return_aux, "max_scores", False)):
        if return_lse:
            raise ValueError("return_lse and return_aux are both given, expected one")
        raise NotImplementedError("return_aux asks for max_scores, expected lse at most")
    out, lse = flash_attn_func(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
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
