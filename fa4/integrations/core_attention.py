"""What the attention modules of training stacks share: ways of communication, masks by pairs, packed rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..api import flash_attn_varlen_func
from ..distributed import context_parallel_attention

METHODS = {None: "ring", "p2p": "ring", "all_gather": "all-gather"}


class Rows(NamedTuple):
    """Of packed rows: where sequences start, (batch + 1,), the most rows of one, and how many rows of each count,
    (batch,), if not all."""

    starts: Tensor
    max_seqlen: int | None
    lengths: Tensor | None

    @staticmethod
    def of(starts: Tensor, padded: Tensor | None, max_seqlen: int | None) -> Rows:
        """starts: as if nothing lay between sequences; padded: where they do start, if something does."""
        if padded is None or padded is starts:
            return Rows(starts, max_seqlen, None)
        return Rows(padded, max_seqlen, starts.diff())


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, of_q: Rows, of_k: Rows, group: Any, method: str, options: dict[str, Any]
) -> Any:
    """(rows, heads_q, head_dim_v), of one process or of a group under context parallelism.

    Raises:
        NotImplementedError: rows between sequences under context parallelism.
    """
    if group is None:
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=of_q.starts, cu_seqlens_k=of_k.starts, max_seqlen_q=of_q.max_seqlen,
            max_seqlen_k=of_k.max_seqlen, seqused_q=of_q.lengths, seqused_k=of_k.lengths, **options,
        )  # fmt: skip
    if of_q.lengths is not None or of_k.lengths is not None:
        raise NotImplementedError("packed sequences with padding between them under context parallelism")
    return context_parallel_attention(
        q, k, v, group=group, method=method, cu_seqlens=of_q.starts, max_seqlen=of_q.max_seqlen, **options
    )


def unmasked(mask: Tensor) -> Any:
    """The mask_mod of a bool tensor, (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), True where a pair is masked."""
    shared = [extent == 1 for extent in mask.shape[:3]]

    def seen(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        place = [0 if one else i for one, i in zip(shared, (b, h, q_idx))]
        return ~mask[(*place, kv_idx)]

    return seen
