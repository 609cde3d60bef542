"""Factors on q, k and v of 8 and 4 bits: which kernels take them, what they get, and checks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.spec import MX_BLOCK, AttentionInputs, Cache, Operands
from . import checks, e2m1, recipes


class Descales(NamedTuple):
    """Factors on 8-bit q, k and v, of the shapes in `recipes.expected_shapes`; None means 1. Or scales of e2m1
    tensors."""

    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None


_SCALES = "q_scales", "k_scales", "v_scales"  # of a `Cache`


def operands_of(inputs: AttentionInputs, descales: Descales) -> Operands | None:
    """Return what a kernel must multiply; None if there is none for such scales.

    E4M3: each factor is that of all, or of a sequence and key/value head. MXFP8: or those of blocks along the axis that
    the product sums over. NVFP4: of e2m1 numbers, whose scales `e2m1.check` has checked.
    """
    if e2m1.has_e2m1(inputs.q):
        return Operands.NVFP4
    if are_of_heads(inputs, descales):
        return Operands.E4M3
    if inputs.q.shape[-1] % MX_BLOCK:
        return None
    of_blocks = _scales_of_blocks(descales)
    along_sums = (
        scales is None or (scales.shape[-1] == x.shape[-1]) == (name == "v")
        for name, x, scales in zip("qkv", inputs, of_blocks)
    )
    others = Descales(*(x if scales is None else None for x, scales in zip(descales, of_blocks)))
    return Operands.MXFP8 if all(along_sums) and are_of_heads(inputs, others) else None


def ones(inputs: AttentionInputs, operands: Operands) -> Descales:
    """Return factors of 1 for which a kernel multiplies these operands."""
    if operands is Operands.NVFP4:
        return Descales(*e2m1.ones(*inputs[:3]))
    if operands is Operands.E4M3:
        return Descales()
    return Descales(*map(recipes.as_e8m0, _ones_of_blocks(inputs)))


def are_of_heads(inputs: AttentionInputs, descales: Descales) -> bool:
    """Whether each factor is that of all, or of a sequence and key/value head."""
    shape = inputs.batch, inputs.k.shape[-2]
    given = (x for x in descales if x is not None)
    return all(x.dtype == torch.float32 and (x.numel() == 1 or tuple(x.shape) == shape) for x in given)


def _scales_of_blocks(descales: Descales) -> list[Tensor | None]:
    """Return the scales of recipe "mxfp8" as uint8, None for others."""
    return [None if x is None or x.dtype == torch.float32 else x.view(torch.uint8) for x in descales]


def operand_factors(inputs: AttentionInputs, descales: Descales, operands: Operands) -> Cache:
    """Return the factors of the operands of a forward."""
    if operands is Operands.NVFP4:
        of_e2m1 = e2m1.ones(*inputs[:3]) if descales.q_descale is None else descales
        return Cache(**dict(zip(_SCALES, (x.view(torch.uint8) for x in of_e2m1 if x is not None))))
    if operands is Operands.E4M3:
        return factors_of_heads(inputs, descales)
    of_blocks = _scales_of_blocks(descales)
    others = Descales(*(x if scales is None else None for x, scales in zip(descales, of_blocks)))
    scales = (one if given is None else given for given, one in zip(of_blocks, _ones_of_blocks(inputs)))
    return factors_of_heads(inputs, others)._replace(**dict(zip(_SCALES, scales)))


def _ones_of_blocks(inputs: AttentionInputs) -> Iterator[Tensor]:
    """Yield the scales of 1 of q, k and v, as uint8."""
    for x, axis in zip(inputs[:3], ("head_dim", "head_dim", "tokens")):
        yield recipes.ones(x.shape, inputs.batch, axis, x.device)


def factors_of_heads(inputs: AttentionInputs, descales: Descales) -> Cache:
    """Return the factors of scores and of v for each sequence and key/value head."""
    q_factor, k_factor, v_factor = of_heads(inputs, descales)
    return Cache(k_descale=(q_factor * k_factor).contiguous(), v_descale=v_factor.contiguous())


def of_heads(inputs: AttentionInputs, descales: Descales) -> list[Tensor]:
    """Return the factors of q, k and v for each sequence and key/value head."""
    shape, one = (inputs.batch, inputs.k.shape[-2]), torch.ones((), device=inputs.q.device)
    factors = (one if x is None else x.reshape(()) if x.numel() == 1 else x for x in descales)
    return [x.expand(shape) for x in factors]


def dequantized(inputs: AttentionInputs, descales: Descales, dtype: torch.dtype) -> AttentionInputs:
    """Return the inputs with q, k and v as numbers of `dtype`."""
    if e2m1.has_e2m1(inputs.q):
        q, k, v = e2m1.dequantized(inputs[:3], descales, dtype)
        return AttentionInputs(q, k, v, *inputs[3:])
    bounds = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.cu_seqlens_k
    q, k, v = (recipes.dequantized(x, s, dtype, cu) for x, s, cu in zip(inputs[:3], descales, bounds))
    return AttentionInputs(q, k, v, *inputs[3:])


def check_descales(inputs: AttentionInputs, descales: tuple) -> None:
    """Raise unless each descale has the dtype, shape and device of a recipe's scales."""
    heads_kv = inputs.k.shape[-2]
    for name, x, descale in zip(("q", "k", "v"), inputs, descales):
        if descale is None:
            continue
        assert isinstance(x, Tensor)
        heads = (heads_kv,) if x.shape[-2] == heads_kv else (heads_kv, x.shape[-2])
        check_scales(f"{name}_descale", descale, name, x, inputs.batch, heads)


def check_scales(label: str, scales: Any, name: str, x: Tensor, batch: int, heads: tuple[int, ...]) -> None:
    """Raise unless `scales` may stand beside the 8-bit x. heads: the numbers of heads that they may have."""
    checks.check_plain(label, scales, x, like=name)
    if scales.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(f"{label} requires grad, and scales have no gradients: pass {label}.detach()")
    if scales.dtype not in (torch.float32, recipes.E8M0):
        raise TypeError(f"{label} has dtype {scales.dtype}, expected torch.float32 or {recipes.E8M0}")
    possible = recipes.expected_shapes(x.shape, batch, heads)
    names = ("mxfp8", "tokens") if scales.dtype == recipes.E8M0 else ("tensor", "head", "block128")
    allowed = [shape for name in names for shape in possible[name]]
    if tuple(scales.shape) not in allowed:
        shown = ", ".join(map(str, dict.fromkeys(allowed)))
        text = f"expected one of {shown} for {scales.dtype} beside {name} {checks.shown(x)}"
        raise ValueError(f"{label} has shape {checks.shown(scales)}, {text}")
