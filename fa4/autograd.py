"""Gradients of `fa4::forward`: each tensor among the operator's arguments gets its gradient or None, by name.

There are no second derivatives: asking for them raises, where an operator without a rule would give wrong values.
"""

from __future__ import annotations

from typing import get_type_hints

import torch
from torch import Tensor

from . import batching, ops
from .spec import AttentionInputs, Flags, Saved

_HINTS = {name: hint for record in ops.FORWARD for name, hint in get_type_hints(record).items()}
_TENSORS = sum(hint in (Tensor, Tensor | None) for hint in _HINTS.values()) - 1  # stand first, and `scales` last


def forward(inputs: AttentionInputs, flags: Flags) -> tuple[Tensor, Tensor]:
    """(out, lse) by the operator."""
    flags = ops.with_scales(flags)
    # torch.func sees through no operator with a registered gradient, but through this.
    operator = _Forward.apply if not torch.compiler.is_compiling() and ops.transformed() else torch.ops.fa4.forward
    return operator(*inputs, *flags)


def _setup_context(ctx, inputs, output):
    # A caller that uses only out must not pay for a zero dlse.
    ctx.set_materialize_grads(False)
    ctx.numbers = inputs[_TENSORS:-1]
    ctx.save_for_backward(*output, *inputs[:_TENSORS], inputs[-1])


def _gradients(ctx, dout, dlse, operator=None):
    out, lse, *tensors, scales = ctx.saved_tensors
    grads = dict.fromkeys(_HINTS)
    if dout is None and dlse is None:
        return tuple(grads.values())
    if dout is None:
        dout = torch.zeros_like(out)
    operator = operator or torch.ops.fa4.backward
    dq, dk, dv, dsink = operator(*Saved(out, lse, dout, dlse), *tensors, *ctx.numbers, scales)
    has_sink = dict(zip(_HINTS, tensors))["sink"] is not None
    grads.update(q=dq, k=dk, v=dv, sink=dsink if has_sink else None)
    return tuple(grads.values())


def _second_derivative(ctx, *grads):
    raise NotImplementedError(
        "fa4 attention has first derivatives only, and one of its gradients was differentiated (create_graph=True); "
        "for second derivatives use torch's scaled_dot_product_attention with SDPBackend.MATH"
    )


torch.library.register_autograd("fa4::forward", _gradients, setup_context=_setup_context, lib=ops.library)
torch.library.register_autograd("fa4::backward", _second_derivative, lib=ops.library)


class _Forward(torch.autograd.Function):
    """`fa4::forward` for torch.func, which needs a class of this form."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.fa4.forward(*arguments)

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx, dout, dlse):
        return _gradients(ctx, dout, dlse, _Backward.apply)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return batching.rule(_Forward.apply, ops.names(ops.FORWARD))(info, in_dims, *arguments)


class _Backward(torch.autograd.Function):
    """`fa4::backward` likewise."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.fa4.backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(_second_derivative)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return batching.rule(_Backward.apply, ops.names(ops.BACKWARD))(info, in_dims, *arguments)
