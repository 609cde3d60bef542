"""Attention, backward: what happens around a plan's launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..mods.record import Mods
from ..plan import Plan
from ..spec import AttentionInputs, AttentionSpec, Gradients, Saved
from . import allocate, prepare


def backward(
    inputs: AttentionInputs,
    spec: AttentionSpec,
    plan: Plan,
    saved: Saved,
    mods: Mods | None = None,
    captured: Sequence[Tensor | None] = (),
) -> Gradients:
    """Gradients of q, k, v and the sink, row-major; `plan` is for `spec.with_positive_scale()`. captured: zeros, to
    which the gradients of captured tensors are added."""
    extra = () if mods is None else (mods, captured)
    device = inputs.q.device
    if device.type == "cuda" and prepare.is_elsewhere(device.index):
        with torch.cuda.device(device):
            return backward(inputs, spec, plan, saved, mods, captured)
    grads = allocate.gradients(inputs, spec, plan)
    if plan.is_empty(inputs):
        for x in grads[:3]:
            x.zero_()
        terms = None if inputs.sink is None else _sink_takes_all(inputs, saved)
    else:
        ready = prepare.inputs_for(plan.layout, inputs, spec)
        terms = plan.backward(ready, prepare.saved_for(plan.layout, saved), grads, *extra)
        if spec.softmax_scale < 0:
            grads.dq.neg_()
        elif spec.softmax_scale == 0:  # the plan's is not quite
            grads.dq.zero_()
            grads.dk.zero_()
    if inputs.sink is None or terms is None:
        return grads
    return grads._replace(dsink=terms.flatten(1).sum(1).to(inputs.sink.dtype))


def _sink_takes_all(inputs: AttentionInputs, saved: Saved) -> Tensor:
    """The terms of dsink where lse is the sink itself: dlse of the rows in use."""
    dlse = torch.zeros_like(saved.lse) if saved.dlse is None else saved.dlse
    terms = dlse.masked_fill(saved.lse == -torch.inf, 0.0)
    return terms if terms.ndim == 2 else terms.transpose(0, 1)
