"""Gradients of attention: one autograd rule for the operators, and one for calls that bypass torch's dispatcher, which
costs more host time than a short kernel takes on the GPU.

There are no second derivatives: requesting them raises, because an operator without a rule would return wrong values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..mods.ir.record import Mods
from ..runtime.spec import AttentionInputs, Flags, Gradients, Saved
from ..runtime.torch_internals import apply_of, may_be_transformed, needs_dispatcher
from . import batching, ops

Backward = Callable[..., ops.InputAndCapturedGrads]
"""(saved, inputs, mods, flags, *descales, *products) -> gradients; the last two in calls on 8-bit tensors only."""


def save(
    ctx: Any,
    results: tuple[Tensor, Tensor],
    inputs: AttentionInputs,
    flags: Flags,
    mods: Mods | None = None,
    descales: tuple[Tensor | None, ...] = (),
    products: tuple[bool, ...] = (),
) -> None:
    """Save for the backward. Every tensor, block lists included, is a saved tensor: a change before the backward then
    raises, and saved-tensor hooks see it."""
    ctx.set_materialize_grads(False)  # a caller that uses only out must not pay for a zero dlse
    scales = flags.scales
    ctx.flags = flags if scales is None else flags._replace(scales=None)
    ctx.max_seqlens, ctx.products = inputs.max_seqlens, products
    if mods is None:
        ctx.mods = None
        ctx.save_for_backward(*results, *inputs.tensors, scales, *descales)
    else:
        ctx.mods = mods._replace(tensors=[], blocks=[], dropout_seed=None)
        ctx.counts = len(mods.tensors), len(mods.blocks)
        of_mods = mods.dropout_seed, *mods.tensors, *mods.blocks
        ctx.save_for_backward(*results, *inputs.tensors, scales, *of_mods, *descales)


def run_backward(
    backward: Backward, ctx: Any, dout: Tensor | None, dlse: Tensor | None
) -> ops.InputAndCapturedGrads | None:
    """Run a backward on what `save` stored; None if there is no incoming gradient."""
    if dout is None and dlse is None:
        return None
    out, lse, *tensors = ctx.saved_tensors
    inputs, scales, others = AttentionInputs(*tensors[:8], *ctx.max_seqlens), tensors[8], tensors[9:]
    flags = ctx.flags if scales is None else ctx.flags._replace(scales=scales)
    mods = ctx.mods
    if mods is not None:
        seed, *lists = others
        captured, blocks = ctx.counts
        others = lists[captured + blocks :]
        mods = mods._replace(tensors=lists[:captured], blocks=lists[captured : captured + blocks], dropout_seed=seed)
    saved = Saved(out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
    return backward(saved, inputs, mods, flags, *others, *ctx.products)


def autograd_rule(
    records: ops.Records, differentiable: tuple[str, ...] = ("q", "k", "v"), usual: Backward = ops.backward
) -> tuple[Callable[..., None], Callable[..., tuple]]:
    """Return setup_context and backward for `torch.library.register_autograd`, for a forward operator whose arguments
    are the records' fields. Each argument gets its gradient or None, by name. differentiable: the arguments that get
    dq, dk and dv."""
    names = ops.names(records)

    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        parts = ops.split(inputs, records)
        sources = parts.pop("sources", ())  # 16-bit tensors of a call that saves 8-bit ones; None if there are none
        ctx.has_leaves = all(x is not None for x in sources)
        save(ctx, output, **parts)

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, by: Backward = usual) -> tuple:
        grads = dict[str, Any].fromkeys(names)
        if ctx.mods is not None:
            captured, blocks = ctx.counts
            # torch expects a list for a tensor list, and treats every empty list as a tensor list.
            grads.update(tensors=[None] * captured, blocks=[None] * blocks)
            grads.update({name: [] for name in ("numbers", "trained") if not getattr(ctx.mods, name)})
        found = run_backward(by, ctx, dout, dlse)
        if found is not None:
            of_inputs, of_captured = found
            grads.update(zip((*differentiable, "sink"), of_inputs))
            if not ctx.has_leaves:
                grads.update(dict.fromkeys(differentiable))
            if ctx.mods is not None:
                grads["tensors"] = of_captured
        return tuple(grads.values())

    return setup_context, backward


def second_derivative(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "fa4 attention has first derivatives only, and one of its gradients was differentiated (create_graph=True); "
        "for second derivatives use torch's scaled_dot_product_attention with SDPBackend.MATH"
    )


for _suffix, _records in (("", ops.FORWARD), ("_with_mods", ops.FORWARD_WITH_MODS)):
    _setup, _rule = autograd_rule(_records)
    torch.library.register_autograd(f"fa4::forward{_suffix}", _rule, setup_context=_setup, lib=ops.library)
    torch.library.register_autograd(f"fa4::backward{_suffix}", second_derivative, lib=ops.library)
_setup_context, _backward = autograd_rule(ops.FORWARD)


def forward(inputs: AttentionInputs, mods: Mods | None, flags: Flags) -> tuple[Tensor, Tensor]:
    """Return (out, lse) by the operator."""
    if mods is not None or torch.compiler.is_compiling() or not may_be_transformed():
        return ops.forward(inputs, mods, flags)
    try:  # torch.func cannot transform an operator with a registered gradient, but it can transform this
        return _Forward.apply(*inputs, *flags)
    except RuntimeError as error:
        if "Functionalize rule" not in str(error):
            raise
        raise NotImplementedError("fa4 attention does not work inside torch.func.functionalize") from error


class _Forward(torch.autograd.Function):
    """`fa4::forward` for torch.func, which needs an autograd function of this form."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.fa4.forward(*arguments)

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx, dout, dlse):
        return _backward(ctx, dout, dlse, _by_function)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return batching.rule(_Forward.apply, ops.names(ops.FORWARD))(info, in_dims, *arguments)


def _by_function(saved: Saved, inputs: AttentionInputs, mods: Mods | None, flags: Flags) -> ops.InputAndCapturedGrads:
    dq, dk, dv, dsink = _Backward.apply(*saved, *inputs, *flags)
    return Gradients(dq, dk, dv, None if inputs.sink is None else dsink), []


class _Backward(torch.autograd.Function):
    """`fa4::backward` for torch.func."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.fa4.backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    backward = staticmethod(second_derivative)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return batching.rule(_Backward.apply, ops.names(ops.backward_of(ops.FORWARD)))(info, in_dims, *arguments)


def attend(
    route: ops.AnyRoute, flags: Flags, inputs: AttentionInputs, mods: Mods | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) with autograd, for a call that needs no dispatcher."""
    return _apply(route, flags, inputs, mods, *inputs[:4], *(() if mods is None else mods.tensors))


class _Attention(torch.autograd.Function):
    """Autograd function; its differentiable arguments follow `mods`: q, k, v, the sink, and captured tensors."""

    @staticmethod
    def forward(ctx, route, flags, inputs, mods, *differentiable):
        results = route.forward(inputs, mods)
        ctx.route = route
        save(ctx, results, inputs, flags, mods)
        return results

    @staticmethod
    def backward(ctx, dout, dlse):
        def backward(saved, inputs, mods, flags):
            if torch.is_grad_enabled() or needs_dispatcher(inputs):  # a mode is active, or double backward
                return ops.backward(saved, inputs, mods, flags)
            return ctx.route.backward(inputs, saved, mods)

        found = run_backward(backward, ctx, dout, dlse)
        if found is None:
            return (None,) * len(ctx.needs_input_grad)
        of_inputs, of_captured = found
        return None, None, None, None, *of_inputs, *of_captured


_apply = apply_of(_Attention)
