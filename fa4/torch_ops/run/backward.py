"""Execution of the backward of a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...mods.ir.record import Mods
from ...runtime.plan import Plan
from ...runtime.spec import AttentionInputs, AttentionSpec, Gradients, Saved
from . import allocate, prepare


class BackwardExecutor:
    """Executor of the backward for one kind of problem; the counterpart of `ForwardExecutor`."""

    def __init__(self, inputs: AttentionInputs, spec: AttentionSpec, plan: Plan) -> None:
        """`plan` is for `spec.with_positive_scale()`."""
        self.spec, self.plan = spec, plan
        self._is_empty = plan.is_empty(inputs)
        self._fits = prepare.fits_if_aligned(plan.layout, inputs, spec)
        self._device = prepare.device_to_enter(inputs.q.device)
        self._make = allocate.gradient_maker(inputs, spec, plan)

    def __call__(self, inputs: AttentionInputs, saved: Saved, *extra: Any) -> Gradients:
        """Return the gradients of q, k, v and the sink, row-major. extra: mods of the call, if any, and zero tensors,
        to which the gradients of captured tensors are added."""
        if self._device is not None and prepare.is_other_device(self._device):
            with torch.cuda.device(self._device):
                return self(inputs, saved, *extra)
        grads, spec, sink = self._make(inputs), self.spec, inputs.sink
        if self._is_empty:
            for x in grads[:3]:
                x.zero_()
            terms = None if sink is None else _dsink_terms_without_keys(inputs, saved)
        else:
            layout = self.plan.layout
            if not (self._fits and prepare.are_aligned(inputs)):
                inputs = prepare.inputs_for(layout, inputs, spec)
            terms = self.plan.backward(inputs, prepare.saved_for(layout, saved), grads, *extra)
            if spec.softmax_scale <= 0:
                _undo_scale(spec.softmax_scale, grads)
        if sink is None or terms is None:
            return grads
        return grads._replace(dsink=terms.flatten(1).sum(1).to(sink.dtype))


def backward(
    inputs: AttentionInputs, spec: AttentionSpec, plan: Plan, saved: Saved, mods: Mods | None = None, captured: Any = ()
) -> Gradients:
    """Run the backward once, without caching; `plan` is for `spec.with_positive_scale()`."""
    return BackwardExecutor(inputs, spec, plan)(inputs, saved, *(() if mods is None else (mods, captured)))


def _undo_scale(softmax_scale: float, grads: Gradients) -> None:
    """Correct the gradients for a scale <= 0: the plan supports positive scales only."""
    if softmax_scale < 0:
        grads.dq.neg_()
    else:  # the plan uses a tiny positive scale instead of 0
        grads.dq.zero_()
        grads.dk.zero_()


def _dsink_terms_without_keys(inputs: AttentionInputs, saved: Saved) -> Tensor:
    """Terms of dsink if no query has a key: lse is the sink, so each term is dlse, and 0 in padding rows."""
    dlse = torch.zeros_like(saved.lse) if saved.dlse is None else saved.dlse
    terms = dlse.masked_fill(saved.lse == -torch.inf, 0.0)
    return terms if terms.ndim == 2 else terms.transpose(0, 1)
