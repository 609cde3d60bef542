"""Tensors as plans want them: views where their memory allows it, copies where it does not."""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan import Layout
from ..spec import AttentionInputs, AttentionSpec, Saved
from ..torch_internals import current_cuda_device
from .allocate import rows_dtype

ALIGNMENT = 16  # bytes; kernels copy rows in vectors of this size, and TMA maps have bases and strides of it


def inputs_for(layout: Layout, inputs: AttentionInputs, spec: AttentionSpec) -> AttentionInputs:
    """q, k, v in the layout, q with the sign of the softmax scale, the sink in lse's dtype."""
    q0, k0, v0, sink0 = inputs[:4]
    q, k, v, sink = _laid_out(q0, layout), _laid_out(k0, layout), _laid_out(v0, layout), sink0
    if spec.softmax_scale < 0:
        q = -q
    if sink is not None:
        sink = sink.to(rows_dtype(spec)).contiguous()
    if q is q0 and k is k0 and v is v0 and sink is sink0:
        return inputs
    return inputs._replace(q=q, k=k, v=v, sink=sink)


def fits_if_aligned(layout: Layout, inputs: AttentionInputs, spec: AttentionSpec) -> bool:
    """Whether `inputs_for` gives back inputs of these shapes, strides and dtypes if they are aligned."""
    sink = inputs.sink
    if spec.softmax_scale < 0 or not (sink is None or (sink.dtype == rows_dtype(spec) and sink.is_contiguous())):
        return False
    return all(x.is_contiguous() or _steps_fit(layout, x) for x in inputs[:3])


def are_aligned(inputs: tuple) -> bool:
    """Of q, k and v, the first of these."""
    return (inputs[0].data_ptr() | inputs[1].data_ptr() | inputs[2].data_ptr()) % ALIGNMENT == 0


def saved_for(layout: Layout, saved: Saved) -> Saved:
    """out and dout in the layout, the values of rows contiguous: autograd hands over expanded ones."""
    out, lse, dout, dlse = saved
    aligned = (out.data_ptr() | dout.data_ptr()) % ALIGNMENT == 0
    if aligned and dlse is None and out.is_contiguous() and dout.is_contiguous() and lse.is_contiguous():
        return saved
    dlse = None if dlse is None else dlse.contiguous()
    return Saved(_laid_out(out, layout), lse.contiguous(), _laid_out(dout, layout), dlse)


def _laid_out(x: Tensor, layout: Layout) -> Tensor:
    """x, or a contiguous copy if the layout asks for it."""
    if layout is Layout.ANY:
        return x
    # (the rows of kernels are multiples of 16 bytes long)
    if x.data_ptr() % ALIGNMENT == 0 and (x.is_contiguous() or _steps_fit(layout, x)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _steps_fit(layout: Layout, x: Tensor) -> bool:
    """Whether the strides of all axes that have more than one entry are whole vectors, and of the layout."""
    strides, elements = x.stride(), ALIGNMENT // x.element_size()
    steps = [stride for stride, extent in zip(strides[:-1], x.shape[:-1]) if extent != 1]
    aligned = strides[-1] == 1 and all(step % elements == 0 for step in steps)
    return aligned and (layout is not Layout.TMA or all(steps))


def device_to_enter(device: torch.device) -> int | None:
    """The index of a device that may not be the current one; None where there is one device only."""
    return device.index if device.type == "cuda" and torch.cuda.device_count() > 1 else None


def is_elsewhere(index: int) -> bool:
    """Whether a CUDA device, of which there is a tensor, is not the current one, on which launches would land."""
    return index != current_cuda_device()
