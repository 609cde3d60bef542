"""An output of 8 bits, for a matrix product after attention."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..runtime.torch_internals import needs_dispatcher
from . import checks, recipes

_LARGEST = torch.finfo(recipes.E4M3).max


def check(out_descale: Any, given: dict[str, Any]) -> None:
    """Check `out_descale` before a call. given: the tensors that could get gradients, by the caller's names.

    Its value is checked on a CPU; on other devices only with FA4_CHECK_LENGTHS=1, which synchronises.

    Raises:
        TypeError, ValueError: it has the wrong type, dtype, shape, device or value, or q is nested.
        NotImplementedError: a tensor requires grad.
    """
    q = given["q"]
    if not isinstance(q, Tensor):
        return  # the checks of the call say so
    if q.is_nested:
        raise ValueError("out_descale is given with a nested q, expected packed tensors with cu_seqlens_q")
    checks.check_plain("out_descale", out_descale, q)
    if out_descale.dtype != torch.float32:
        raise TypeError(f"out_descale has dtype {out_descale.dtype}, expected torch.float32")
    if out_descale.shape not in ((), (1,)):
        raise ValueError(f"out_descale has shape {checks.shown(out_descale)}, expected () or (1,)")
    for name, x in (*given.items(), ("out_descale", out_descale)):
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name} requires grad, and an out of 8 bits has no gradients: call it under torch.no_grad() or pass "
                f"{name}.detach()"
            )
    if needs_dispatcher((out_descale,)) or out_descale.is_meta or not checks.checks_lengths(out_descale.device.type):
        return  # there is no value, or reading it would synchronise
    value = float(out_descale)
    if not 0 < value < math.inf:
        raise ValueError(f"out_descale is {value}, expected a finite number above 0")


def rounded(out: Tensor, out_descale: Tensor) -> Tensor:
    """Return out / out_descale as e4m3; numbers beyond its range saturate, NaN stays.

    Raises:
        NotImplementedError: out requires grad.
    """
    if out.requires_grad:
        raise NotImplementedError(
            "score_mod captured a tensor that requires grad, and an out of 8 bits has no gradients: call it under "
            "torch.no_grad()"
        )
    scaled = out * out_descale.reshape(()).reciprocal()
    return scaled.clamp_(-_LARGEST, _LARGEST).to(recipes.E4M3)
