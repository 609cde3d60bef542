"""Arguments of an append to a cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.spec import CONVERTED


class AppendArguments(NamedTuple):
    """New rows for a cache, and their rotation and that of q: the arguments of `fa4::append_to_cache`.

    q: (batch, rows, heads_q, head_dim), packed (rows, heads_q, head_dim). k_cache, v_cache: see `spec.Cache`; modified
    in place. k, v: (batch, new rows, heads_kv, head_dim), packed (new rows, heads_kv, head_dim) with cu_seqlens_k_new.
    cache_seqlens: (batch,) int32, cache row of a sequence's first new row. cos, sin: (positions, rotary_dim / 2).
    rotary_seqlens: (batch,) int32, position of the first new row, if it differs from cache_seqlens. page_table,
    batch_idx, leftpad, k_descale, v_descale: those of `spec.Cache`, but for `nvfp4`, whose scales are k_scales and
    v_scales: they are modified, too. interleaved: rotated pairs are neighbours, else columns i and i + rotary_dim / 2.
    same_position: all of a sequence's queries have the position of its first new row. backend: that of the call.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor
    v: Tensor
    cache_seqlens: Tensor
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    rotary_seqlens: Tensor | None = None
    page_table: Tensor | None = None
    batch_idx: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    interleaved: bool = True
    same_position: bool = False
    backend: str = "auto"
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None

    @property
    def batch(self) -> int:
        return self.cache_seqlens.shape[0]

    @property
    def positions(self) -> Tensor:
        """Rotary position of each sequence's first new row."""
        return self.cache_seqlens if self.rotary_seqlens is None else self.rotary_seqlens

    @property
    def converted_dtype(self) -> torch.dtype | None:
        """dtype of a cache whose numbers are converted, else None."""
        return self.k_cache.dtype if self.k_cache.dtype in CONVERTED else None
