"""The memory of results, and which of their rows nobody writes.

Kernels write the rows that sequences use. There may be others: packed rows past the last of cu_seqlens, and rows past
seqused. Those are 0 in out and gradients and -inf in lse, here, once for every backend.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..memory import empty
from ..spec import AttentionInputs, AttentionSpec, Gradients


def rows_dtype(spec: AttentionSpec) -> torch.dtype:
    """The dtype of lse and of what else has a value a row."""
    return torch.float64 if spec.dtype == torch.float64 else torch.float32


@functools.lru_cache(maxsize=4096)
def _shapes(shape_q: torch.Size, head_dim_v: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of out and of lse."""
    *batch, rows, heads, _ = shape_q
    return (*batch, rows, heads, head_dim_v), (*batch, heads, rows)


def outputs(inputs: AttentionInputs, spec: AttentionSpec, written: bool = False) -> tuple[Tensor, Tensor]:
    """out in q's layout with head_dim_v columns, and lse (batch, heads, rows) or varlen (heads, rows).

    `written`: whoever fills them writes every row.
    """
    q = inputs.q
    shape, rows_shape = _shapes(q.shape, spec.head_dim_v)
    device = q.device
    out = empty(shape, spec.dtype, device)
    lse = empty(rows_shape, rows_dtype(spec), device)
    if not written and (spec.varlen or spec.has_seqused_q):
        out.zero_()
        lse.fill_(-torch.inf)
    return out, lse


UNWRITTEN = torch.inf  # no row's own lse: at +inf logits it is NaN


def parts(splits: int, inputs: AttentionInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """out and lse in float32 for each part of the keys: (splits, ...). lse is `UNWRITTEN` in rows that nobody uses."""
    q = inputs.q
    shape, rows_shape = _shapes(q.shape, spec.head_dim_v)
    out = empty((splits, *shape), torch.float32, q.device)
    lse = empty((splits, *rows_shape), torch.float32, q.device)
    if spec.varlen or spec.has_seqused_q:
        lse.fill_(UNWRITTEN)
    return out, lse


def gradients(inputs: AttentionInputs, spec: AttentionSpec) -> Gradients:
    """dq, dk, dv, row-major like q, k, v."""
    idle_q, idle_k = spec.varlen or spec.has_seqused_q, spec.varlen or spec.has_seqused_k
    dq, dk, dv = (empty(x.shape, x.dtype, x.device) for x in inputs[:3])
    for x, idle in ((dq, idle_q), (dk, idle_k), (dv, idle_k)):
        if idle:
            x.zero_()
    return Gradients(dq, dk, dv)


def used_rows(inputs: AttentionInputs) -> Tensor:
    """Which rows of q sequences use, bool, to go with lse: (batch, 1, rows) or varlen (rows,). Does not synchronise."""
    q, used = inputs.q, inputs.seqused_q
    if inputs.cu_seqlens_q is None:
        row = torch.arange(q.shape[1], device=q.device).expand(q.shape[0], 1, -1)
        return row >= 0 if used is None else row < used[:, None, None]
    row = torch.arange(q.shape[0], device=q.device)
    if used is None or used.shape[0] == 0:
        return row < inputs.cu_seqlens_q[-1]
    starts, stops = inputs.cu_seqlens_q[:-1], inputs.cu_seqlens_q[1:]
    sequence = torch.searchsorted(stops, row, right=True).clamp_(max=used.shape[0] - 1)
    return row < starts[sequence] + used[sequence]
