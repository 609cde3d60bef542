"""Allocation of results, and initialisation of padding rows.

Kernels write only the rows that sequences use. Padding rows are packed rows past the last entry of cu_seqlens, and rows
past seqused. This module sets them to 0 in out and gradients and to -inf in lse, for every backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ...core import padding
from ...runtime.memory import empty, maker
from ...runtime.plan import Plan
from ...runtime.spec import AttentionInputs, AttentionSpec, Gradients


def shapes(shape_q: torch.Size, head_dim_v: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out (like q, with head_dim_v columns) and of lse: (batch, heads, rows), or varlen (heads, rows)."""
    *batch, rows, heads, _ = shape_q
    return (*batch, rows, heads, head_dim_v), (*batch, heads, rows)


UNWRITTEN = torch.inf
"""Preset lse of split-KV parts in padding rows. No computed lse is +inf: with +inf logits it is NaN."""


ResultMaker = Callable[..., tuple[Tensor, Tensor]]
"""Allocator of out and lse (or their split-KV parts) for inputs whose first entry is q. A second argument, the caller's
out, takes the place of an allocated one."""


def result_maker(
    inputs: AttentionInputs, spec: AttentionSpec, dtypes: tuple[torch.dtype, torch.dtype], parts: tuple[int, ...] = ()
) -> ResultMaker:
    """Return an allocator of out and lse, row-major, for inputs like these.

    dtypes: of out and lse. parts: leading axes, of split-KV parts.
    Dense shapes are fixed here; the number of packed rows changes from call to call.
    """
    device, columns = inputs.q.device, spec.head_dim_v
    out_dtype, lse_dtype = dtypes
    if not spec.varlen:
        out_shape, lse_shape = shapes(inputs.q.shape, columns)
        out, lse = maker((*parts, *out_shape), out_dtype, device), maker((*parts, *lse_shape), lse_dtype, device)
        return lambda inputs, given=None: (out() if given is None else given, lse())

    def make(inputs: tuple, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
        out_shape, lse_shape = shapes(inputs[0].shape, columns)
        out = empty((*parts, *out_shape), out_dtype, device) if given is None else given
        return out, empty((*parts, *lse_shape), lse_dtype, device)

    return make


def gradient_maker(inputs: AttentionInputs, spec: AttentionSpec, plan: Plan) -> Callable[[AttentionInputs], Gradients]:
    """Return an allocator of dq, dk, dv for inputs like these: shaped like q, k, v, row-major, 0 in padding rows."""
    dtype = spec.dtype
    fixed = None if spec.varlen else [maker(tuple(x.shape), dtype, x.device) for x in inputs[:3]]
    set_q, set_k = padding_setter(inputs, spec, plan, "q", 1), padding_setter(inputs, spec, plan, "k", 2)

    def make(inputs: AttentionInputs) -> Gradients:
        if fixed is None:
            grads = Gradients(*[empty(x.shape, dtype, x.device) for x in (inputs.q, inputs.k, inputs.v)])
        else:
            grads = Gradients(*[make_one() for make_one in fixed])
        if set_q is not None:
            set_q(inputs, grads[:1], None)
        if set_k is not None:
            set_k(inputs, grads[1:3], None)
        return grads

    return make


PaddingSetter = Callable[[AttentionInputs, tuple[Tensor, ...], Tensor | None], None]
"""Setter of padding rows of inputs: of matrices to 0, of rows of lse (or None) to a fill value."""


def padding_setter(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    plan: Plan,
    side: str,
    matrices: int,
    parts: int | None = None,
    fill: float = -torch.inf,
) -> PaddingSetter | None:
    """Return the setter for inputs like these; None if there can be no padding rows.

    Args:
        side: "q" or "k": the tensor that has the same rows as the results.
        matrices: number of results shaped like q, k or v.
        parts: number of lse in `rows`, with a leading axis if more than 1; None without `rows`.
        fill: value that is written into `rows`.
    """
    has_seqused = spec.has_seqused_q if side == "q" else spec.has_seqused_k
    if not (spec.varlen or has_seqused):
        return None
    if not plan.compiled or plan.is_empty(inputs):
        return functools.partial(_fill_all, fill)
    leading = None if parts is None else int(parts > 1)
    cfg = padding.PaddingRowsConfig(spec.dtype, matrices, leading, fill, spec.varlen, has_seqused)
    launcher = padding.SET_PADDING_ROWS.launcher(cfg, plan.chip)

    def blocks_of(inputs: AttentionInputs) -> int:
        groups = inputs.batch + spec.varlen if has_seqused else 1
        q, k = inputs.q, inputs.k
        largest = max(q.numel(), k.numel()) if matrices else (parts or 1) * q.numel() // q.shape[-1]
        return padding.blocks(largest, groups, plan.chip)

    fixed = None if spec.varlen else blocks_of(inputs)

    def set_padding_rows(inputs: AttentionInputs, matrices: tuple[Tensor, ...], rows: Tensor | None) -> None:
        lengths = (inputs.cu_seqlens_q, inputs.seqused_q) if side == "q" else (inputs.cu_seqlens_k, inputs.seqused_k)
        launcher((matrices or None, rows, *lengths), blocks_of(inputs) if fixed is None else fixed)

    return set_padding_rows


def _fill_all(fill: float, inputs: AttentionInputs, matrices: tuple[Tensor, ...], rows: Tensor | None) -> None:
    """Fill all rows, before the plan writes the used ones."""
    for x in matrices:
        x.zero_()
    if rows is not None:
        rows.fill_(fill)


def used_rows(inputs: AttentionInputs) -> Tensor:
    """Mask of the q rows that sequences use, bool, broadcasts to lse: (batch, 1, rows), or varlen (rows,). No sync."""
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
