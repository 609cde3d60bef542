"""Calls that want gradients and that nobody watches, past torch's dispatcher: the operators' own passage through it and
through autograd takes the host longer than a short kernel takes the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .mods.record import Mods
from .run.allocate import rows_dtype
from .spec import AttentionInputs, Flags, Saved


def attend(route: ops.Route, flags: Flags, inputs: AttentionInputs, mods: Mods | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse), which autograd knows."""
    return _apply(route, flags, inputs, mods, *inputs[:4], *(() if mods is None else mods.tensors))


def gradients(
    route: ops.Route, saved: Saved, inputs: AttentionInputs, mods: Mods | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, list[Tensor | None]]:
    """dq, dk, dv, dsink, and those of captured tensors, of which some ask for none."""
    if mods is None:
        return *route.backward(inputs, saved), []
    captured = [
        torch.zeros(x.shape, dtype=rows_dtype(route.spec), device=x.device) if i in mods.trained else None
        for i, x in enumerate(mods.tensors)
    ]
    made = route.backward(inputs, saved, mods, captured)
    return *made, [None if dx is None else dx.to(x.dtype) for x, dx in zip(mods.tensors, captured)]


class _Attention(torch.autograd.Function):
    """Of the arguments behind `mods` autograd knows: q, k, v, the sink, and captured tensors."""

    @staticmethod
    def forward(ctx, route, flags, inputs, mods, *differentiable):
        out, lse = route.forward(inputs) if mods is None else route.forward(inputs, mods)
        ctx.set_materialize_grads(False)
        ctx.given = route, flags, None if mods is None else mods._replace(tensors=[], dropout_seed=None), inputs[8:]
        if mods is None:
            ctx.save_for_backward(out, lse, *inputs[:8])
        else:
            ctx.save_for_backward(out, lse, *inputs[:8], mods.dropout_seed, *mods.tensors)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        route, flags, mods, max_seqlens = ctx.given
        out, lse, *tensors = ctx.saved_tensors
        if dout is None and dlse is None:
            return (None,) * (8 + max(0, len(tensors) - 9))
        inputs = AttentionInputs(*tensors[:8], *max_seqlens)
        if mods is not None:
            mods = mods._replace(tensors=tensors[9:], dropout_seed=tensors[8])
        saved = Saved(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
        if torch.is_grad_enabled() or ops.watched(inputs):  # whoever looks now, or differentiates again
            dq, dk, dv, dsink, of_captured = _by_operator(saved, inputs, mods, flags)
        else:
            dq, dk, dv, dsink, of_captured = gradients(route, saved, inputs, mods)
        return None, None, None, None, dq, dk, dv, dsink, *of_captured


# `_Attention.apply` without its search for transforms of torch.func, of which none is at work where nobody watches.
_apply = super(torch.autograd.Function, _Attention).apply


def _by_operator(saved: Saved, inputs: AttentionInputs, mods: Mods | None, flags: Flags) -> tuple:
    if mods is None:
        dq, dk, dv, dsink = torch.ops.fa4.backward(*saved, *inputs, *flags)
        of_captured = []
    else:
        dq, dk, dv, dsink, of_captured = torch.ops.fa4.backward_with_mods(*saved, *inputs, *mods, *flags)
        of_captured = [dx if i in mods.trained else None for i, dx in enumerate(of_captured)]
    return dq, dk, dv, None if inputs.sink is None else dsink, of_captured
