"""Tensors as plans want them: views where their memory allows it, copies where it does not."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from ..plan import Layout
from ..spec import AttentionInputs, AttentionSpec, Saved
from .allocate import rows_dtype

_ALIGNMENT = 16  # bytes; kernels copy rows in vectors of this size, and TMA maps have bases and strides of it


def inputs_for(layout: Layout, inputs: AttentionInputs, spec: AttentionSpec) -> AttentionInputs:
    """q, k, v in the layout, q with the sign of the softmax scale, the sink in lse's dtype."""
    q, k, v = (_laid_out(x, layout) for x in inputs[:3])
    sink = inputs.sink
    if spec.softmax_scale < 0:
        q = -q
    if sink is not None:
        sink = sink.to(rows_dtype(spec)).contiguous()
    if q is inputs.q and k is inputs.k and v is inputs.v and sink is inputs.sink:
        return inputs
    return inputs._replace(q=q, k=k, v=v, sink=sink)


def saved_for(layout: Layout, saved: Saved) -> Saved:
    """out and dout in the layout, the values of rows contiguous: autograd hands over expanded ones."""
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    return Saved(_laid_out(saved.out, layout), saved.lse.contiguous(), _laid_out(saved.dout, layout), dlse)


def _laid_out(x: Tensor, layout: Layout) -> Tensor:
    """x, or a contiguous copy if the layout asks for it."""
    if layout is Layout.ANY:
        return x
    starts_right = x.data_ptr() % _ALIGNMENT == 0
    if starts_right and x.is_contiguous():  # the rows of kernels are multiples of 16 bytes long
        return x
    steps = [stride for stride, extent in zip(x.stride()[:-1], x.shape[:-1]) if extent != 1]
    elements = _ALIGNMENT // x.element_size()
    fits = starts_right and x.stride(-1) == 1 and all(step % elements == 0 for step in steps)
    if fits and (layout is not Layout.TMA or all(steps)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager:
    """Makes the device of `x` the current one, on which launches land."""
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return contextlib.nullcontext()
