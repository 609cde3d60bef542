"""FlashMLA's decoding on fa4: `from fa4.compat.flash_mla import ...` replaces `from flash_mla import ...`.

Positional order, defaults and meaning of the arguments are FlashMLA's, except:

    k_cache            pages may have any number of rows; any widths; bf16, fp16, fp32 and fp64, on any device
    rows without keys  have lse -inf
    is_fp8_kvcache     also for dense attention, on any NVIDIA GPU since Ampere and on CPUs
    sparse attention, attn_sink: NotImplementedError

`fa4.mla_attention_with_kvcache` also appends rows and takes packed queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..kvcache import flash_attn_with_kvcache
from ..runtime import scaled_rows
from ..runtime.spec import BYTES
from ..torch_ops import checks

__all__ = ["Metadata", "flash_mla_with_kvcache", "get_mla_metadata"]


@dataclass(frozen=True)
class Metadata:
    """What `get_mla_metadata` returns. It holds nothing: fa4 reads lengths on the device, in each call."""


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[Metadata, None]:
    """Return metadata for `flash_mla_with_kvcache`. Its arguments, those of any version of FlashMLA, are not read."""
    return Metadata(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Metadata,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute latent attention of absorbed queries on a cache.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim).
        k_cache: (pages, rows of a page, heads_kv, head_dim); the first head_dim_v columns of a row are its values. With
            is_fp8_kvcache, (pages, rows of a page, 1, 656) of 8 bits, see `fa4.mla_attention_with_kvcache`.
        block_table: (batch, pages of a sequence) int32. cache_seqlens: (batch,) int32.
        softmax_scale: default 1 / sqrt(head_dim).

    Returns:
        out (batch, seqlen_q, heads_q, head_dim_v) and lse (batch, heads_q, seqlen_q), float32.

    Raises:
        NotImplementedError: an argument of sparse attention is given.
        TypeError, ValueError: those of `fa4.flash_attn_with_kvcache`.
    """
    unsupported = dict(
        indices=indices, attn_sink=attn_sink, extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache, topk_length=topk_length, extra_topk_length=extra_topk_length,
    )  # fmt: skip
    for name, value in unsupported.items():
        if value is not None:
            raise NotImplementedError(f"{name} is given, expected None: dense attention")
    if not isinstance(tile_scheduler_metadata, Metadata) or num_splits is not None:
        given = type(tile_scheduler_metadata).__name__, type(num_splits).__name__
        raise TypeError(
            f"tile_scheduler_metadata and num_splits are a {given[0]} and a {given[1]}, expected what get_mla_metadata "
            "of this module returns"
        )
    for name, table in (("block_table", block_table), ("cache_seqlens", cache_seqlens)):
        if table is None:
            raise TypeError(f"{name} is None, expected a torch.Tensor")
    checks.check_plain("k_cache", k_cache, q, like="q")
    columns = k_cache.shape[-1] if k_cache.ndim else 0
    if checks.boolean("is_fp8_kvcache", is_fp8_kvcache, "a bool"):
        if columns != scaled_rows.BYTES_OF_ROW or k_cache.dtype not in (*BYTES, scaled_rows.DTYPE):
            raise ValueError(
                f"k_cache has dtype {k_cache.dtype} and shape {checks.shown(k_cache)}, expected 8 bits and "
                f"{scaled_rows.BYTES_OF_ROW} columns to go with is_fp8_kvcache"
            )
        k_cache, columns = k_cache.view(scaled_rows.DTYPE), scaled_rows.LATENT
    width = checks.count("head_dim_v", head_dim_v)
    if not 0 < width <= columns:
        raise ValueError(f"head_dim_v is {head_dim_v}, expected 1 to {columns}, the columns of k_cache")
    out, lse = flash_attn_with_kvcache(
        q, k_cache, k_cache[..., :width], block_table=block_table, cache_seqlens=cache_seqlens,
        softmax_scale=softmax_scale, causal=causal, return_lse=True,
    )  # fmt: skip
    return out, lse
