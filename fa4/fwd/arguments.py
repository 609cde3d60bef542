"""Host-side preparation that every chip's kernels share: alignment, outputs, the order of run-time arguments."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .. import jit
from ..spec import AttentionInputs, AttentionSpec

_ALIGNMENT = 16  # bytes; kernels copy rows in vectors of this size
_empty_strided_cuda = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)
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


def elsewhere(x: Tensor) -> bool:
    """Whether `x` lives on a CUDA device other than the current one, on which launches would land."""
    return x.device.type == "cuda" and x.device.index != torch.cuda.current_device()


def prepared(inputs: AttentionInputs, spec: AttentionSpec) -> tuple[AttentionInputs, float]:
    """Inputs whose rows are aligned and whose sink is at most 32 bits wide, and a positive softmax scale; a negative
    one moves its sign into q.

    Online softmax takes the maximum of unscaled scores, which needs a positive scale.
    """
    q, k, v = aligned(inputs.q), aligned(inputs.k), aligned(inputs.v)
    if spec.softmax_scale < 0:
        q = -q
    sink = inputs.sink
    if sink is not None and sink.dtype == torch.float64:
        sink = sink.float()
    if q is not inputs.q or k is not inputs.k or v is not inputs.v or sink is not inputs.sink:
        inputs = inputs._replace(q=q, k=k, v=v, sink=sink)
    return inputs, max(abs(spec.softmax_scale), _TINY_SCALE)


@functools.lru_cache(maxsize=4096)
def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A row-major tensor with unset values.

    On CUDA, `device` must be the current one. There it is made by the allocation call that torch.compile's generated
    code uses, where this torch has it: a tenth of torch.empty's host time, which is most of a short call's.
    """
    if _empty_strided_cuda is not None and device.type == "cuda":
        shape = tuple(shape)  # it takes no torch.Size
        return _empty_strided_cuda(shape, _row_major(shape), dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def allocate_outputs(inputs: AttentionInputs, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """out in q's layout with head_dim_v columns, and lse: (batch, heads, rows) or (heads, total) float32.

    Kernels write the rows in use. Where there may be others (past the last of cu_seqlens, past seqused_q), they are
    0 and -inf from the start.
    """
    q = inputs.q
    if inputs.varlen:
        total, heads, _ = q.shape
        out = torch.zeros((total, heads, spec.head_dim_v), dtype=q.dtype, device=q.device)
        return out, torch.full((heads, total), -torch.inf, dtype=torch.float32, device=q.device)
    batch, rows, heads, _ = q.shape
    out = empty((batch, rows, heads, spec.head_dim_v), q.dtype, q.device)
    lse = empty((batch, heads, rows), torch.float32, q.device)
    if spec.has_seqused_q:
        out.zero_()
        lse.fill_(-torch.inf)
    return out, lse


def lengths(inputs: AttentionInputs) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: in the order kernels take them."""
    return inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k


def fake_lengths(kernel: Any) -> list:
    """Stand-ins for `lengths` where a kernel is compiled: None for those that it is without, as its fields say."""
    from cutlass import Int32

    present = (kernel.varlen, kernel.varlen, kernel.has_seqused_q, kernel.has_seqused_k)
    return [jit.fake_tensor(Int32, 1, align=4) if there else None for there in present]


def windows(spec: AttentionSpec) -> tuple[int, int]:
    """window_left, window_right as numbers; what an open side says is not read."""
    return spec.window_left or 0, spec.window_right or 0
