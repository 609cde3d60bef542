"""Preparation of input tensors for a plan: the tensors themselves if alignment and strides fit, else copies."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ...runtime.plan import Layout
from ...runtime.spec import AttentionInputs, AttentionSpec, Saved, compute_dtype
from ...runtime.torch_internals import current_cuda_device

ALIGNMENT = 16  # bytes; vector loads of kernels and TMA maps need bases and strides that are multiples of it


def inputs_for(layout: Layout, inputs: AttentionInputs, spec: AttentionSpec) -> AttentionInputs:
    """Return inputs with q, k, v in the layout, q negated for a negative softmax scale, and the sink in lse's dtype."""
    q0, k0, v0, sink0 = inputs[:4]
    q, k, v, sink = in_layout(q0, layout), in_layout(k0, layout), in_layout(v0, layout), sink0
    if spec.softmax_scale < 0:
        q = -q
    if sink is not None:
        sink = sink.to(compute_dtype(spec.dtype)).contiguous()
    if q is q0 and k is k0 and v is v0 and sink is sink0:
        return inputs
    return inputs._replace(q=q, k=k, v=v, sink=sink)


def fits_if_aligned(layout: Layout, inputs: AttentionInputs, spec: AttentionSpec) -> bool:
    """True if `inputs_for` returns aligned inputs of these shapes, strides and dtypes unchanged."""
    sink = inputs.sink
    sink_fits = sink is None or (sink.dtype == compute_dtype(spec.dtype) and sink.is_contiguous())
    return (
        spec.softmax_scale >= 0 and sink_fits and all(x.is_contiguous() or _strides_fit(layout, x) for x in inputs[:3])
    )


def are_aligned(inputs: tuple) -> bool:
    """True if q, k and v (the first three) are aligned."""
    return (inputs[0].data_ptr() | inputs[1].data_ptr() | inputs[2].data_ptr()) % ALIGNMENT == 0


def saved_for(layout: Layout, saved: Saved) -> Saved:
    """Return out and dout in the layout, and contiguous lse and dlse: autograd may pass expanded tensors."""
    out, lse, dout, dlse = saved
    aligned = (out.data_ptr() | dout.data_ptr()) % ALIGNMENT == 0
    if aligned and dlse is None and out.is_contiguous() and dout.is_contiguous() and lse.is_contiguous():
        return saved
    dlse = None if dlse is None else dlse.contiguous()
    return Saved(in_layout(out, layout), lse.contiguous(), in_layout(dout, layout), dlse)


def in_layout(x: Tensor, layout: Layout) -> Tensor:
    """Return x, or a contiguous copy if x does not fit the layout."""
    if layout is Layout.ANY:
        return x
    # (row lengths are multiples of 16 bytes)
    if x.data_ptr() % ALIGNMENT == 0 and (x.is_contiguous() or _strides_fit(layout, x)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _strides_fit(layout: Layout, x: Tensor) -> bool:
    """True if strides fit the layout: last 1, others whole 16-byte vectors; axes of extent 1 do not count."""
    strides, elements = x.stride(), ALIGNMENT // x.element_size()
    steps = [stride for stride, extent in zip(strides[:-1], x.shape[:-1]) if extent != 1]
    aligned = strides[-1] == 1 and all(step % elements == 0 for step in steps)
    return aligned and (layout is not Layout.TMA or all(steps))


def device_to_enter(device: torch.device) -> int | None:
    """Index of a CUDA device that may not be the current one; None if there is only one device."""
    return device.index if device.type == "cuda" and torch.cuda.device_count() > 1 else None


def is_other_device(index: int) -> bool:
    """True if a CUDA device is not the current one. Launches go to the current device."""
    return index != current_cuda_device()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Make a CUDA device the current one inside this context."""
    index = device_to_enter(device)
    is_other = index is not None and is_other_device(index)
    return torch.cuda.device(index) if is_other else contextlib.nullcontext()
