"""Tiles of K and V in the compute dtype, converted tile by tile from how they are stored."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..runtime import nvfp4, scaled_rows
from ..runtime.spec import AttentionInputs, CacheSpec
from .passes import Pass
from .tiles import load_k

KeyTiles = Callable[[range], tuple[Tensor, Tensor]]
"""Function that loads rows of a pass: K and V, (heads, rows, dim)."""


def key_tiles(part: Pass, inputs: AttentionInputs, dtype: torch.dtype) -> KeyTiles:
    """Return the loads of a pass."""
    cache, stored, dim_v = part.cache, part.spec.cache or CacheSpec(), part.spec.head_dim_v
    k, v = inputs.k, inputs.v
    if stored.is_nvfp4:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    k, v = part.k_view(k), part.k_view(v)
    if stored.has_scaled_rows:

        def rows_of_bytes(rows: range) -> tuple[Tensor, Tensor]:
            keys = load_k(scaled_rows.values(k[:, rows.start : rows.stop]), range(len(rows)), dtype)
            return keys, keys[..., :dim_v]

        return rows_of_bytes
    if cache is None or cache.k_descale is None or cache.v_descale is None:
        return lambda rows: (load_k(k, rows, dtype), load_k(v, rows, dtype))
    descales = cache.k_descale, cache.v_descale
    if stored.is_nvfp4:
        scales = [part.k_view(x) for x in descales]

        def with_scales(rows: range) -> tuple[Tensor, Tensor]:
            return tuple(  # type: ignore[return-value]
                nvfp4.values(load_k(x, rows, x.dtype), load_k(scale, rows, scale.dtype), dtype)
                for x, scale in zip((k, v), scales)
            )

        return with_scales
    factors = [x[part.first_sequence, part.heads, None, None].to(dtype) for x in descales]
    return lambda rows: (load_k(k, rows, dtype) * factors[0], load_k(v, rows, dtype) * factors[1])
