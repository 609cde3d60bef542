"""Gradients of attention: one rule for the operators, and for calls past torch's dispatcher, a passage that takes the
host longer than a short kernel takes the GPU.

There are no second derivatives: asking for them raises, where an operator without a rule would give wrong values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import batching, ops
from .mods.record import Mods
from .run.allocate import rows_dtype
from .spec import AttentionInputs, Flags, Gradients, Saved
from .torch_internals import apply_of, may_be_transformed, needs_dispatcher

Found = tuple[Gradients, list[Tensor | None]]
"""Gradients of q, k, v and the sink, and those of captured tensors, of which some ask for none."""
Backward = Callable[[Saved, AttentionInputs, Mods | None, Flags], Found]


def save(ctx: Any, results: tuple[Tensor, Tensor], inputs: AttentionInputs, mods: Mods | None, flags: Flags) -> None:
    """Keep what the rule needs, all tensors as saved ones: one that changes before the backward is then an error, and
    hooks see them. Lists of blocks are among them."""
    ctx.set_materialize_grads(False)  # a caller that uses only out must not pay for a zero dlse
    scales = flags.scales
    ctx.flags = flags if scales is None else flags._replace(scales=None)
    ctx.max_seqlens = inputs.max_seqlen_q, inputs.max_seqlen_k
    if mods is None:
        ctx.mods = None
        ctx.save_for_backward(*results, *inputs[:8], scales)
    else:
        ctx.mods = mods._replace(tensors=[], blocks=[], dropout_seed=None)
        ctx.counts = len(mods.tensors), len(mods.blocks)
        ctx.save_for_backward(*results, *inputs[:8], scales, mods.dropout_seed, *mods.tensors, *mods.blocks)


def found_by(backward: Backward, ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Found | None:
    """What a backward finds for what `save` kept; None where no gradient came."""
    if dout is None and dlse is None:
        return None
    out, lse, q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, scales, *others = ctx.saved_tensors
    inputs = AttentionInputs(
        q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *ctx.max_seqlens
    )  # fmt: skip
    flags = ctx.flags if scales is None else ctx.flags._replace(scales=scales)
    mods = ctx.mods
    if mods is not None:
        seed, *lists = others
        captured, _ = ctx.counts
        mods = mods._replace(tensors=lists[:captured], blocks=lists[captured:], dropout_seed=seed)
    return backward(Saved(out, lse, torch.zeros_like(out) if dout is None else dout, dlse), inputs, mods, flags)


def by_operator(
    saved: Saved, inputs: AttentionInputs, mods: Mods | None, flags: Flags, operator: Callable | None = None
) -> Found:
    """operator: in place of fa4::backward."""
    captured: list[Tensor | None] = []
    if mods is None:
        dq, dk, dv, dsink = (operator or torch.ops.fa4.backward)(*saved, *inputs, *flags)
    else:
        dq, dk, dv, dsink, all_captured = torch.ops.fa4.backward_with_mods(*saved, *inputs, *mods, *flags)
        captured = [dx if i in mods.trained else None for i, dx in enumerate(all_captured)]
    return Gradients(dq, dk, dv, None if inputs.sink is None else dsink), captured


def by_route(route: ops.Route, saved: Saved, inputs: AttentionInputs, mods: Mods | None) -> Found:
    """Past torch's dispatcher."""
    if mods is None:
        return route.backward(inputs, saved), []
    captured = [
        torch.zeros(x.shape, dtype=rows_dtype(route.spec), device=x.device) if i in mods.trained else None
        for i, x in enumerate(mods.tensors)
    ]
    found = route.backward(inputs, saved, mods, captured)
    return found, [None if dx is None else dx.to(x.dtype) for x, dx in zip(mods.tensors, captured)]


def rule_of(records: tuple) -> tuple[Callable[..., None], Callable[..., tuple]]:
    """What `torch.library.register_autograd` asks for, of a forward operator whose arguments are the records' fields:
    each tensor among them gets its gradient or None, by name."""
    names = ops.names(records)

    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        given, *mods, flags = ops.split(inputs, records)
        save(ctx, output, given, mods[0] if mods else None, flags)

    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, by: Backward = by_operator) -> tuple:
        grads = dict[str, Any].fromkeys(names)
        if ctx.mods is not None:
            captured, blocks = ctx.counts
            # torch wants lists for lists of tensors, and takes every empty list for one.
            grads.update(tensors=[None] * captured, blocks=[None] * blocks)
            grads.update({name: [] for name in ("numbers", "trained") if not getattr(ctx.mods, name)})
        found = found_by(by, ctx, dout, dlse)
        if found is not None:
            of_inputs, of_captured = found
            grads.update(zip(("q", "k", "v", "sink"), of_inputs))
            if ctx.mods is not None:
                grads["tensors"] = of_captured
        return tuple(grads.values())

    return setup_context, backward


def _second_derivative(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "fa4 attention has first derivatives only, and one of its gradients was differentiated (create_graph=True); "
        "for second derivatives use torch's scaled_dot_product_attention with SDPBackend.MATH"
    )


def register(suffix: str, records: tuple) -> None:
    """The rule for `fa4::forward{suffix}`, whose arguments are the records' fields, and `fa4::backward{suffix}`."""
    setup_context, backward = rule_of(records)
    torch.library.register_autograd(f"fa4::forward{suffix}", backward, setup_context=setup_context, lib=ops.library)
    torch.library.register_autograd(f"fa4::backward{suffix}", _second_derivative, lib=ops.library)


register("", ops.FORWARD)
_setup_context, _backward = rule_of(ops.FORWARD)


def forward(inputs: AttentionInputs, flags: Flags) -> tuple[Tensor, Tensor]:
    """(out, lse) by the operator."""
    flags = ops.with_scales(flags)
    if torch.compiler.is_compiling() or not may_be_transformed():
        return torch.ops.fa4.forward(*inputs, *flags)
    try:  # torch.func sees through no operator with a registered gradient, but through this
        return _Forward.apply(*inputs, *flags)
    except RuntimeError as error:
        if "Functionalize rule" not in str(error):
            raise
        raise NotImplementedError("fa4 attention does not work inside torch.func.functionalize") from error


class _Forward(torch.autograd.Function):
    """`fa4::forward` for torch.func, which needs a class of this form."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.fa4.forward(*arguments)

    setup_context = staticmethod(_setup_context)

    @staticmethod
    def backward(ctx, dout, dlse):
        return _backward(ctx, dout, dlse, functools.partial(by_operator, operator=_Backward.apply))

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


def attend(route: ops.Route, flags: Flags, inputs: AttentionInputs, mods: Mods | None = None) -> tuple[Tensor, Tensor]:
    """(out, lse), which autograd knows, of a call that needs no dispatcher."""
    return _apply(route, flags, inputs, mods, *inputs[:4], *(() if mods is None else mods.tensors))


class _Attention(torch.autograd.Function):
    """Of the arguments behind `mods` autograd knows: q, k, v, the sink, and captured tensors."""

    @staticmethod
    def forward(ctx, route, flags, inputs, mods, *differentiable):
        results = route.forward(inputs) if mods is None else route.forward(inputs, mods)
        ctx.route = route
        save(ctx, results, inputs, mods, flags)
        return results

    @staticmethod
    def backward(ctx, dout, dlse):
        def backward(saved, inputs, mods, flags):
            if torch.is_grad_enabled() or needs_dispatcher(inputs):  # whoever looks now, or differentiates again
                return by_operator(saved, inputs, mods, flags)
            return by_route(ctx.route, saved, inputs, mods)

        found = found_by(backward, ctx, dout, dlse)
        if found is None:
            return (None,) * len(ctx.needs_input_grad)
        of_inputs, of_captured = found
        return None, None, None, None, *of_inputs, *of_captured


_apply = apply_of(_Attention)
