"""Calls on e2m1 q, k and v with e4m3 scales of blocks of 16 (recipe "nvfp4"): checks, and the 16-bit tensors that they
stand for. A byte of q and k has two columns, one of v two tokens (`runtime.nvfp4`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..runtime import nvfp4
from . import checks

_AXES = "(batch, seqlen, heads, head_dim)"


def has_e2m1(*tensors: Any) -> bool:
    """Whether one of q, k and v has the dtype."""
    return any(getattr(x, "dtype", None) is nvfp4.DTYPE for x in tensors)


def check(packed: bool, tensors: tuple[Tensor, Tensor, Tensor], descales: tuple) -> None:
    """Raise unless e2m1 q, k and v have scales and rows that fit each other. What holds of tensors of any dtype is
    checked of `stand_ins`."""
    if packed:
        raise NotImplementedError(
            f"q has dtype {nvfp4.DTYPE}, which packed sequences do not support: pass padded tensors to "
            "flash_attn_func, with seqused_k"
        )
    for name, x in zip("qkv", tensors):
        checks.check_plain(name, x, tensors[0])
        if x.ndim != 4:
            raise ValueError(f"{name} has {x.ndim} dimensions, shape {checks.shown(x)}, expected 4: {_AXES}")
        if x.shape[-1] and x.stride(-1) != 1:
            raise ValueError(f"{name} has stride {x.stride(-1)} on its last axis, expected 1: call {name}.contiguous()")
    (_, k, v), (of_q, of_k, of_v) = tensors, descales
    tokens = k.shape[1]
    if v.shape[:3] != (k.shape[0], nvfp4.bytes_of(tokens), k.shape[2]):
        expected = (k.shape[0], nvfp4.bytes_of(tokens), k.shape[2])
        raise ValueError(
            f"v has shape {checks.shown(v)}, expected ({', '.join(map(str, expected))}, *) to go with the {tokens} "
            "tokens of k: two tokens a byte, as fa4.quantize(v, 'nvfp4', axis='tokens') returns"
        )
    for name, x, scales in zip("qk", tensors, (of_q, of_k)):
        checks.check_e2m1_scales(f"{name}_descale", scales, name, x)
    check_scales_of_tokens("v_descale", of_v, "v", v, tokens)
    for name, scales in zip("qkv", descales):
        if scales.requires_grad and torch.is_grad_enabled():
            label = f"{name}_descale"
            raise NotImplementedError(f"{label} requires grad, and scales have no gradients: pass {label}.detach()")


def check_scales_of_tokens(label: str, scales: Any, name: str, x: Tensor, tokens: int) -> None:
    """Raise unless `scales` may stand beside e2m1 numbers x of so many tokens, two a byte: one of e4m3 for each 16."""
    like = f"{nvfp4.SCALE_DTYPE} scales of {name}, as fa4.quantize(..., 'nvfp4', axis='tokens') returns"
    checks.check_plain(label, scales, x, like, name)
    checks.check_dtype(label, scales, (nvfp4.SCALE_DTYPE,))
    expected = (x.shape[0], nvfp4.groups_of(tokens), *x.shape[2:])
    if scales.shape != expected:
        raise ValueError(
            f"{label} has shape {checks.shown(scales)}, expected {expected} beside {name} {checks.shown(x)}"
        )


def stand_ins(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return bfloat16 tensors of the shapes that q, k and v stand for, without values or memory of their own."""
    rows = q.shape[1], k.shape[1], k.shape[1]
    columns = nvfp4.columns_of(q), nvfp4.columns_of(k), v.shape[-1]
    made = []
    for x, n, dim in zip((q, k, v), rows, columns):
        row = x.new_empty(dim, dtype=torch.bfloat16)
        made.append(row.as_strided((x.shape[0], n, x.shape[2], dim), (0, 0, 0, 1)))
    return made[0], made[1], made[2]


def dequantized(tensors: tuple, descales: tuple, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v as numbers of `dtype`."""
    (q, k, v), (of_q, of_k, of_v) = (x.view(torch.uint8) for x in tensors), descales
    of_tokens = nvfp4.values_of_tokens(v, of_v, k.shape[1], dtype)
    return nvfp4.values(q, of_q, dtype), nvfp4.values(k, of_k, dtype), of_tokens


def ones(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return scales of 1 of q, k and v."""
    of_rows = ((*x.shape[:3], nvfp4.columns_of(x) // nvfp4.COLUMNS) for x in (q, k))
    shapes = (*of_rows, (v.shape[0], nvfp4.groups_of(k.shape[1]), *v.shape[2:]))
    return [torch.ones(shape, device=q.device).to(nvfp4.SCALE_DTYPE) for shape in shapes]
