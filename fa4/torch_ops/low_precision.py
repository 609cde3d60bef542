"""Attention on e4m3 and e2m1 tensors, and training that rounds 16-bit tensors to e4m3: operators `fa4::forward_8bit`,
`fa4::forward_8bit_with_mods`, `fa4::backward_8bit`, and the checks of such calls.

Calls of these tensors go through torch's dispatcher; those of 16 bits have a shorter way, see `calls`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..mods.ir.record import Mods
from ..runtime import dispatch, nvfp4, torch_internals
from ..runtime.device import chip_of
from ..runtime.spec import (
    MX_BLOCK,
    P_EXPONENT,
    PACKED,
    AttentionInputs,
    AttentionSpec,
    BlockScales,
    Flags,
    GradientOperands,
    Gradients,
    Operands,
    Saved,
    compute_dtype,
    ds_dtype,
)
from ..runtime.torch_internals import autocast_anywhere, is_transformed
from . import autograd, calls, checks, e2m1, flops, ops, recipes, run
from .autocast import cast_all
from .descales import Descales, are_of_heads, check_descales, dequantized, of_heads, operand_factors, operands_of
from .run.allocate import shapes
from .signature import Signature, routes

Precision = Literal["fp8", "fp8-forward", "mxfp8", "mxfp8-forward"]
PRECISIONS = {
    "fp8": Operands.E4M3, "fp8-forward": Operands.E4M3, "mxfp8": Operands.MXFP8, "mxfp8-forward": Operands.MXFP8,
}  # fmt: skip
"""What a kernel may multiply in the forward of a training call."""
_TRAINED = (torch.float16, torch.bfloat16)
_LARGEST_IN_FLOAT16 = 240.0 * 2**8  # e4m3 times a power of two


class Sources(NamedTuple):
    """The 16-bit tensors that q, k and v were rounded from, which get their gradients. Kernels do not read them, and
    autograd does not save them. None in a call on 8-bit tensors."""

    q_source: Tensor | None = None
    k_source: Tensor | None = None
    v_source: Tensor | None = None


class Products(NamedTuple):
    """in_backward: whether the backward may multiply 8-bit numbers, too."""

    in_backward: bool = True


FORWARD: ops.Records = {
    "inputs": AttentionInputs, "descales": Descales, "flags": Flags, "sources": Sources, "products": Products,
}  # fmt: skip
BACKWARD: ops.Records = {"saved": Saved, "inputs": AttentionInputs, "descales": Descales, "flags": Flags}
FORWARD_WITH_MODS: ops.Records = {
    "inputs": AttentionInputs, "descales": Descales, "mods": Mods, "flags": Flags, "sources": Sources,
    "products": Products,
}  # fmt: skip


def in_backward(precision: str) -> Operands | None:
    """Return what a kernel may multiply in the backward of a training call."""
    return None if precision.endswith("-forward") else PRECISIONS[precision]


def native(
    inputs: AttentionInputs, descales: Descales, mods: Mods | None, flags: Flags, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor] | None:
    """Return out in `dtype` and lse of a kernel that multiplies 8-bit numbers; None if no kernel serves the call.

    Such a kernel takes one factor for the scores of a sequence and key/value head, and one for the values; or E8M0
    scales of blocks of 32 numbers."""
    operands = operands_of(inputs, descales)
    if operands is None:
        return None
    flags = flags.resolved()
    packed, extent = inputs.varlen, inputs.extent
    options = flags, extent.rounded() if packed else extent, mods and mods.spec_key(), dtype, operands
    signature = Signature.of("8-bit operator", inputs.tensors, options, PACKED if packed else ())
    forward = routes.find(signature)
    if forward is None:
        forward, spec = False, native_spec(inputs, mods, flags, dtype, operands)
        if spec is not None:
            plan = dispatch.plan(spec, extent, chip_of(inputs.q.device), flags.backend)
            forward = run.ForwardExecutor(inputs, spec, plan)
        routes.keep(signature, forward)
    return forward(inputs, mods, operand_factors(inputs, descales, operands)) if forward else None


def native_spec(
    inputs: AttentionInputs,
    mods: Mods | None,
    flags: Flags,
    dtype: torch.dtype,
    operands: Operands = Operands.E4M3,
    *,
    is_backward: bool = False,
) -> AttentionSpec | None:
    """Return the spec of a forward, or of a backward, for a kernel that multiplies 8-bit numbers; None if no kernel
    serves it."""
    flags = flags.resolved()
    flags = flags._replace(needs_backward=is_backward, deterministic=is_backward and flags.deterministic)
    spec = replace(AttentionSpec.of(inputs, flags, mods), dtype=dtype, operands=operands)
    is_taken = dispatch.takes_8bit_operands(spec, inputs.extent, chip_of(inputs.q.device), flags.backend)
    return spec if is_taken else None


def _dtype(sources: Sources) -> torch.dtype:
    """Return the dtype of out: bfloat16, or that of the tensors that are trained."""
    return torch.bfloat16 if sources.q_source is None else sources.q_source.dtype


def _forward(
    inputs: AttentionInputs,
    descales: Descales,
    flags: Flags,
    sources: Sources,
    products: Products,
    mods: Mods | None = None,
) -> tuple[Tensor, Tensor]:
    checks.lengths(inputs)
    dtype = _dtype(sources)
    results = native(inputs, descales, mods, flags, dtype)
    if results is not None:
        return results
    inputs = dequantized(inputs, descales, dtype)
    return ops.route(inputs, flags, mods).forward(inputs, mods)


def _fake_forward(inputs: AttentionInputs, sources: Sources, **_: Any) -> tuple[Tensor, Tensor]:
    out, lse = shapes(inputs.q.shape, inputs.v.shape[-1])
    return inputs.q.new_empty(out, dtype=_dtype(sources)), inputs.q.new_empty(lse, dtype=compute_dtype(_dtype(sources)))


def _backward(
    saved: Saved, inputs: AttentionInputs, mods: Mods | None, flags: Flags, *others: Any
) -> ops.InputAndCapturedGrads:
    """Compute gradients of attention on the numbers that the forward multiplied: in 8 bits if `Products` allow that and
    a kernel does it, else in 16 bits. others: `Descales`, then `Products`.

    P is exp(S - lse) with the S that lse came from, so its rows sum to 1. D = rowsum(dO * O) takes the 16-bit O that
    was returned.
    """
    *descales, in_backward = others
    factors = Descales(*descales)
    if mods is not None or not in_backward:
        flags = flags._replace(backend=dispatch.for_16_bits(flags.backend))
        return ops.backward(saved, dequantized(inputs, factors, saved.out.dtype), mods, flags)
    dq, dk, dv, dsink = torch.ops.fa4.backward_8bit(*saved, *inputs, *factors, *flags)
    return Gradients(dq, dk, dv, None if inputs.sink is None else dsink), []


def _backward_8bit(saved: Saved, inputs: AttentionInputs, descales: Descales, flags: Flags) -> tuple[Tensor, ...]:
    grads = native_backward(saved, inputs, flags, descales)
    if grads is None:
        inputs = dequantized(inputs, descales, saved.out.dtype)
        flags = flags._replace(backend=dispatch.for_16_bits(flags.backend))
        grads, _ = ops.route(inputs, flags).backward(inputs, saved)
    dq, dk, dv, dsink = grads
    return dq, dk, dv, saved.out.new_empty(0) if dsink is None else dsink


def _fake_backward_8bit(saved: Saved, inputs: AttentionInputs, **_: Any) -> tuple[Tensor, ...]:
    q, k, v, sink = inputs[:4]
    grads = (x.new_empty(x.shape, dtype=saved.out.dtype) for x in (q, k, v))
    return *grads, saved.out.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def native_backward(saved: Saved, inputs: AttentionInputs, flags: Flags, descales: Descales) -> Gradients | None:
    """Return the gradients of a kernel that multiplies 8-bit numbers; None if no kernel serves the call."""
    operands = operands_of(inputs, descales)
    if operands is None:
        return None
    flags, dtype = flags.resolved(), saved.out.dtype
    signature = Signature.of("8-bit backward", inputs.tensors, (flags, inputs.extent, dtype, operands))
    backward = routes.find(signature)
    if backward is None:
        backward, spec = False, native_spec(inputs, None, flags, dtype, operands, is_backward=True)
        if spec is not None:
            plan = dispatch.plan(spec, inputs.extent, chip_of(inputs.q.device), flags.backend)
            backward = run.BackwardExecutor(inputs, spec, plan)
        routes.keep(signature, backward)
    if not backward:
        return None
    dout, of_gradients = gradient_operands(saved, inputs, descales)
    return backward(inputs, saved._replace(dout=dout), None, (), of_gradients)


def gradient_operands(saved: Saved, inputs: AttentionInputs, descales: Descales) -> tuple[Tensor, GradientOperands]:
    """Round dO to e4m3, with a power of two for each sequence and key/value head, or with a scale
    for each block of 32 tokens and 32 columns. Return its values in 16 bits, which D must be of, and the operands of a
    kernel.

    dS has a factor that keeps it in the range of its type, whose largest number is eight times what dP - D + dlse is
    usually of the row with the largest dO: its norm times the root mean square of v, and the largest dlse. P is at most
    1, so only an outlier in dP of a row with few keys is cut off."""
    heads, dout, v = inputs.k.shape[-2], saved.dout, inputs.v
    if dout.dtype == torch.float16:
        dout = _in_range_of_float16(dout)
    scales = None
    if are_of_heads(inputs, descales):
        dout8, of_dout = recipes.quantized(dout, "head", heads, "head_dim", None, None, power_of_two=True)
        of_q, of_k, of_v = of_heads(inputs, descales)
        rounded_dout = recipes.dequantized(dout8, of_dout, dout.dtype)
        numbers, v = dout8.float(), v.float()
    else:
        dout8, of_blocks = recipes.quantized(dout, "mxfp8", None, "tokens", square=True)
        rounded_dout = recipes.dequantized(dout8, of_blocks, dout.dtype)
        scales = block_scales(descales, of_blocks)
        numbers, v = rounded_dout.float(), recipes.dequantized(v, descales.v_descale, torch.float32)
        # Sums of squares of numbers near 1 neither overflow nor vanish.
        of_dout, of_v = _units(numbers, heads), _units(v, heads)
        numbers, v = numbers / recipes.spread(of_dout, dout.shape), v / recipes.spread(of_v, v.shape)
    of_dp, usual = of_dout * of_v, _largest_row(numbers, heads) * _rms(v)
    of_dp = torch.where(of_dp == 0, 1.0, of_dp)
    if saved.dlse is not None:
        usual = usual + saved.dlse.abs().unflatten(1, (heads, -1)).amax((2, 3)) / of_dp
    limit = torch.finfo(ds_dtype(inputs.max_seqlen_k)).max / 8
    factor = torch.exp2(torch.log2(limit / usual.clamp(min=1e-20)).round() - P_EXPONENT)
    of_ds = of_dp / (2**P_EXPONENT * factor)
    if scales is None:
        factors = of_q * of_k, factor, factor / of_dp, of_dout / 2**P_EXPONENT, of_q * of_ds, of_k * of_ds
    else:  # products are of true values
        one = torch.ones_like(factor)
        factors = one, factor / of_dp, factor / of_dp, one / 2**P_EXPONENT, of_ds, of_ds
    return rounded_dout, GradientOperands(dout8, torch.stack(factors), scales)


def _largest_row(dout: Tensor, heads: int) -> Tensor:
    """Return the norm of the largest row of dO, for each sequence and key/value head."""
    return dout.square().sum(-1).unflatten(-1, (heads, -1)).amax((1, 3)).sqrt()


def _rms(v: Tensor) -> Tensor:
    """Return the root mean square of v, for each sequence and key/value head."""
    return v.square().mean((1, 3)).sqrt()


def _units(x: Tensor, heads: int) -> Tensor:
    """Return a power of two near the largest magnitude, for each sequence and key/value head; 1 for zeros."""
    largest = x.abs().unflatten(-2, (heads, -1)).amax((1, 3, 4))
    return torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)


def block_scales(descales: Descales, of_dout: Tensor) -> BlockScales:
    """Return the scales of blocks of 32 tokens and 32 columns, which `rounded` spread over tokens of q and k, and over
    columns of v. of_dout: over columns."""
    q, k, v = (x.view(torch.uint8) for x in descales if x is not None)
    return BlockScales(q[:, ::MX_BLOCK], k[:, ::MX_BLOCK], v[..., ::MX_BLOCK], of_dout[..., ::MX_BLOCK])


def _in_range_of_float16(x: Tensor) -> Tensor:
    """Keep what is finite from becoming inf in float16, when it has been rounded to e4m3."""
    return x.where(x.isinf(), x.clamp(-_LARGEST_IN_FLOAT16, _LARGEST_IN_FLOAT16))


def _flops(inputs: AttentionInputs, flags: Flags, mods: Mods | None = None, **_: Any) -> int:
    return flops.forward(inputs, flags, mods)


def _flops_of_backward(saved: Saved, inputs: AttentionInputs, flags: Flags, **_: Any) -> int:
    return flops.backward(saved, inputs, flags)


ops.define(
    "backward_8bit", BACKWARD, "Tensor dq, Tensor dk, Tensor dv, Tensor dsink", _backward_8bit, _fake_backward_8bit
)
ops.register_flops("backward_8bit", BACKWARD, _flops_of_backward)
torch.library.register_autograd("fa4::backward_8bit", autograd.second_derivative, lib=ops.library)
for _suffix, _records in (("", FORWARD), ("_with_mods", FORWARD_WITH_MODS)):
    ops.define(f"forward_8bit{_suffix}", _records, "Tensor out, Tensor lse", _forward, _fake_forward)
    ops.register_flops(f"forward_8bit{_suffix}", _records, _flops)
    _setup, _rule = autograd.autograd_rule(_records, Sources._fields, _backward)
    torch.library.register_autograd(f"fa4::forward_8bit{_suffix}", _rule, setup_context=_setup, lib=ops.library)


def attend(
    packed: bool,
    tensors: tuple,
    lengths: tuple,
    options: tuple,
    extras: calls.CallExtras | None,
    precision: str | None,
    *descales: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) of a call with 8- or 4-bit tensors, descales or a precision; the other arguments are those of
    `calls.attend`."""
    if functional.scaled_dot_product_attention is not torch_internals.scaled_dot_product_attention:
        calls.refuse_parts_of_sequences()
    if not torch.compiler.is_compiling() and is_transformed():
        raise NotImplementedError(
            "precision and 8-bit q, k and v do not work inside transforms of torch.func, nor do 4-bit ones"
        )
    q, k, v, *others = tensors
    if precision is not None and autocast_anywhere():
        q, k, v = cast_all(q, k, v)
    check_operands(q, k, v, precision, descales)
    if e2m1.has_e2m1(q):
        e2m1.check(packed, (q, k, v), descales)
        given = (*e2m1.stand_ins(q, k, v), *others)
        inputs, mods, flags = calls.checked(packed, given, lengths, options, extras, (torch.bfloat16,))
        inputs, sources, factors = AttentionInputs(q, k, v, *inputs[3:]), Sources(), Descales(*descales)
    else:
        dtypes = _TRAINED if precision else (recipes.E4M3,)
        inputs, mods, flags = calls.checked(packed, (q, k, v, *others), lengths, options, extras, dtypes)
        if precision is None:
            check_descales(inputs, descales)
            sources, factors = Sources(), Descales(*descales)
        else:
            sources = Sources(*inputs[:3])
            inputs, factors = rounded(inputs, precision)
    flags = ops.with_scales(flags)
    # (A call on 8-bit tensors has a gradient of the sink alone.)
    products = Products(precision is not None and in_backward(precision) is not None)
    if mods is None:
        return torch.ops.fa4.forward_8bit(*inputs, *factors, *flags, *sources, *products)
    return torch.ops.fa4.forward_8bit_with_mods(*inputs, *factors, *mods, *flags, *sources, *products)


def rounded(inputs: AttentionInputs, precision: str) -> tuple[AttentionInputs, Descales]:
    """Return the inputs as 8-bit tensors, and their scales. Every scale is a power of two: products of it with e4m3
    numbers are exact in 16 bits, so the backward's numbers are those of a kernel on 8 bits. Scales of "mxfp8" are those
    of blocks of 32 tokens and 32 columns, since a backward reduces both axes of each tensor."""
    q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *bounds = inputs
    rows_q, rows_k = (cu_seqlens_q, seqused_q), (cu_seqlens_k, seqused_k)
    if q.dtype == torch.float16:  # rounded to e4m3, larger numbers would be inf in float16
        q, k, v = (_in_range_of_float16(x) for x in (q, k, v))
    if PRECISIONS[precision] is Operands.E4M3:
        heads = k.shape[-2]
        (q, sq), (k, sk), (v, sv) = (
            recipes.quantized(x, "head", heads, "head_dim", *rows, power_of_two=True)
            for x, rows in ((q, rows_q), (k, rows_k), (v, rows_k))
        )
    else:
        (q, sq), (k, sk), (v, sv) = (
            recipes.quantized(x, "mxfp8", None, axis, *rows, square=True)
            for x, axis, rows in ((q, "head_dim", rows_q), (k, "head_dim", rows_k), (v, "tokens", rows_k))
        )
    lengths: Any = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, *bounds)
    return AttentionInputs(q, k, v, sink, *lengths), Descales(sq, sk, sv)


def check_operands(q: Any, k: Any, v: Any, precision: str | None, descales: tuple) -> None:
    """Raise unless q, k and v have the dtypes of a call with this precision, and may be differentiated if they must."""
    if precision is not None and precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}, expected None or one of {', '.join(map(repr, PRECISIONS))}")
    for name, x in zip(Descales._fields, descales):
        if x is not None and precision is not None:
            raise ValueError(f"{name} is given with precision {precision!r}, expected None: scales are computed")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, expected a torch.Tensor")
        if precision is not None:
            if x.dtype not in _TRAINED:
                raise TypeError(
                    f"{name} has dtype {x.dtype}, expected torch.float16 or torch.bfloat16 for precision {precision!r}"
                )
        elif e2m1.has_e2m1(q, k, v):
            if not e2m1.has_e2m1(x):
                raise TypeError(
                    f"{name} has dtype {x.dtype}, expected {nvfp4.DTYPE}: q, k and v of 4 bits go together; beside "
                    "others, numbers of 4 bits are for a cache of flash_attn_with_kvcache"
                )
        elif x.dtype != recipes.E4M3:
            descale = next((of for of, y in zip(Descales._fields, descales) if y is not None), None)
            of_q = "" if descale is None else f" to go with {descale}"
            reason = of_q if x is q else " like q"
            raise TypeError(f"{name} has dtype {x.dtype}, expected {recipes.E4M3}{reason}")
        elif x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} requires grad, and 8-bit tensors have no gradients: pass {name}.detach(), or 16-bit tensors "
                "with precision='fp8'"
            )
    if precision is not None and PRECISIONS[precision] is Operands.MXFP8 and q.ndim and q.shape[-1] % MX_BLOCK:
        raise ValueError(f"q has head_dim {q.shape[-1]}, expected a multiple of {MX_BLOCK} for precision {precision!r}")
