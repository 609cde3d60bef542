"""Host-side preparation that every chip's kernels share: alignment, outputs, the order of run-time arguments."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..spec import AttentionInputs, AttentionSpec

_ALIGNMENT = 16  # bytes; kernels copy rows in vectors of this size
_TINY_SCALE = 1e-30  # acts as 0 on any finite score, and keeps 0 * -inf out of the kernels


def aligned(x: Tensor) -> Tensor:
    """`x`, or a contiguous copy if some row of it does not start at a multiple of 16 bytes.

    The rows of kernels are multiples of 16 bytes long, so contiguous tensors take the short way.
    """
    if x.is_contiguous() and x.data_ptr() % _ALIGNMENT == 0:
        return x
    elements = _ALIGNMENT // x.element_size()
    fits = all(stride % elements == 0 for stride, extent in zip(x.stride()[:-1], x.shape[:-1]) if extent != 1)
    if fits and x.stride(-1) == 1 and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def prepared(inputs: AttentionInputs, spec: AttentionSpec) -> tuple[AttentionInputs, float]:
    """Inputs whose rows are aligned, and a positive softmax scale; a negative one moves its sign into q.

    Online softmax takes the maximum of unscaled scores, which needs a positive scale.
    """
    q, k, v = aligned(inputs.q), aligned(inputs.k), aligned(inputs.v)
    if spec.softmax_scale < 0:
        q = -q
    if q is not inputs.q or k is not inputs.k or v is not inputs.v:
        inputs = replace(inputs, q=q, k=k, v=v)
    return inputs, max(abs(spec.softmax_scale), _TINY_SCALE)


def allocate_outputs(inputs: AttentionInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """out in q's layout with head_dim_v columns, and lse: (batch, heads, rows) or (heads, total) float32.

    Kernels write the rows in use; rows beyond seqused_q are 0 and -inf from the start.
    """
    q = inputs.q
    out_shape = (*q.shape[:-1], spec.head_dim_v)
    if inputs.varlen:
        lse_shape: tuple[int, ...] = (spec.heads_q, q.shape[0])
    else:
        lse_shape = (q.shape[0], spec.heads_q, q.shape[1])
    if spec.has_seqused_q:
        lse = torch.full(lse_shape, -torch.inf, dtype=torch.float32, device=q.device)
        return q.new_zeros(out_shape), lse
    return q.new_empty(out_shape), torch.empty(lse_shape, dtype=torch.float32, device=q.device)


def lengths(inputs: AttentionInputs) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: in the order kernels take them."""
    return inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k


def windows(spec: AttentionSpec) -> tuple[int, int]:
    """window_left, window_right as numbers; what an open side says is not read."""
    return spec.window_left or 0, spec.window_right or 0
