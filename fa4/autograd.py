"""Gradients of `fa4::forward`, counted by name: each argument of the operator gets its gradient or None.

There are no second derivatives: asking for them raises, where an operator without a rule would give wrong values.
"""

from __future__ import annotations

import torch

from . import ops

_TENSORS = ("q", "k", "v", "sink", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
_NUMBERS = (
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "window_left",
    "window_right",
    "softcap",
    "deterministic",
    "needs_backward",
    "backend",
)


def _setup_context(ctx, inputs, output):
    # A caller that uses only out must not pay for a zero dlse.
    ctx.set_materialize_grads(False)
    tensors, ctx.numbers = inputs[: len(_TENSORS)], inputs[len(_TENSORS) :]
    out, lse = output
    ctx.save_for_backward(*tensors, out, lse)


def _backward(ctx, dout, dlse):
    *tensors, out, lse = ctx.saved_tensors
    named = dict(zip(_TENSORS, tensors))
    grads = dict.fromkeys((*_TENSORS, *_NUMBERS))
    if dout is None and dlse is None:
        return tuple(grads.values())
    if dout is None:
        dout = torch.zeros_like(out)
    q, k, v, *rest = tensors
    dq, dk, dv, dsink = torch.ops.fa4.backward(dout, dlse, q, k, v, out, lse, *rest, *ctx.numbers)
    grads.update(q=dq, k=dk, v=dv, sink=None if named["sink"] is None else dsink)
    return tuple(grads.values())


def _second_derivative(ctx, *grads):
    raise NotImplementedError(
        "fa4 attention has first derivatives only, and one of its gradients was differentiated (create_graph=True); "
        "for second derivatives use torch's scaled_dot_product_attention with SDPBackend.MATH"
    )


torch.library.register_autograd("fa4::forward", _backward, setup_context=_setup_context, lib=ops.library)
torch.library.register_autograd("fa4::backward", _second_derivative, lib=ops.library)
