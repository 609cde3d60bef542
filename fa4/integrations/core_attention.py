"""Shared code of the attention modules for training stacks: communication methods, packed rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..api.dense import flash_attn_varlen_func
from ..distributed import context_parallel_attention
from .documents import PackedLengths

METHODS = {None: "ring", "p2p": "ring", "all_gather": "all-gather"}


def with_padding(starts: Tensor, padded: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return cu_seqlens and seqused (None for all rows) of one side. starts: cu_seqlens without padding between
    sequences. padded: cu_seqlens with that padding, or None."""
    return (starts, None) if padded is None or padded is starts else (padded, starts.diff())


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, lengths: PackedLengths, group: Any, method: str, options: dict[str, Any]
) -> Any:
    """Return out, (rows, heads_q, head_dim_v), of one process or of a context-parallel group.

    Raises:
        NotImplementedError: padding between sequences under context parallelism.
    """
    if group is None:
        return flash_attn_varlen_func(q, k, v, **lengths.named(), **options)
    if lengths.seqused_q is not None or lengths.seqused_k is not None:
        raise NotImplementedError("packed sequences with padding between them under context parallelism")
    return context_parallel_attention(
        q, k, v, group=group, method=method, cu_seqlens=lengths.cu_seqlens_q, max_seqlen=lengths.max_seqlen_q, **options
    )
