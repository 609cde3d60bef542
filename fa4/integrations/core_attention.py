"""Shared code of the attention modules for training stacks: communication methods, masks by pairs, packed rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..api.dense import flash_attn_varlen_func
from ..distributed import context_parallel_attention

METHODS = {None: "ring", "p2p": "ring", "all_gather": "all-gather"}


class PackedSequences(NamedTuple):
    """Sequences in packed rows. starts: (batch + 1,) the first row of each. max_seqlen: the most rows of a sequence.
    lengths: (batch,) used rows of each, None for all."""

    starts: Tensor
    max_seqlen: int | None
    lengths: Tensor | None

    @staticmethod
    def of(starts: Tensor, padded: Tensor | None, max_seqlen: int | None) -> PackedSequences:
        """starts: cu_seqlens without padding between sequences. padded: cu_seqlens with that padding, or None."""
        if padded is None or padded is starts:
            return PackedSequences(starts, max_seqlen, None)
        return PackedSequences(padded, max_seqlen, starts.diff())


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_seqs: PackedSequences,
    k_seqs: PackedSequences,
    group: Any,
    method: str,
    options: dict[str, Any],
) -> Any:
    """Return out, (rows, heads_q, head_dim_v), of one process or of a context-parallel group.

    Raises:
        NotImplementedError: padding between sequences under context parallelism.
    """
    if group is None:
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=q_seqs.starts, cu_seqlens_k=k_seqs.starts, max_seqlen_q=q_seqs.max_seqlen,
            max_seqlen_k=k_seqs.max_seqlen, seqused_q=q_seqs.lengths, seqused_k=k_seqs.lengths, **options,
        )  # fmt: skip
    if q_seqs.lengths is not None or k_seqs.lengths is not None:
        raise NotImplementedError("packed sequences with padding between them under context parallelism")
    return context_parallel_attention(
        q, k, v, group=group, method=method, cu_seqlens=q_seqs.starts, max_seqlen=q_seqs.max_seqlen, **options
    )


def mask_mod_of(mask: Tensor) -> Any:
    """Return the mask_mod of a bool tensor, True for masked: (batch or 1, heads or 1, seqlen_q or 1, seqlen_k)."""
    shared_axes = [size == 1 for size in mask.shape[:3]]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        index = [0 if is_shared else i for is_shared, i in zip(shared_axes, (b, h, q_idx))]
        return ~mask[(*index, kv_idx)]

    return mask_mod
