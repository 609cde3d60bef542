"""Autocast: to which dtype the tensors of a call are cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast lowers operators on x's device; None where autocast is off."""
    kind = x.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
        return None
    return torch.get_autocast_dtype(kind)


def _in_dtype(x: Any, dtype: torch.dtype) -> Any:
    """Cast x to autocast's dtype; what is no tensor, float64 and non-floating tensors stay unchanged."""
    lowered = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(dtype) if lowered else x


def cast_all(q: Tensor, k: Any, v: Any) -> tuple[Tensor, Any, Any]:
    """Cast q, k, v (or None) to autocast's dtype where it is on, as torch's scaled_dot_product_attention does."""
    dtype = autocast_dtype(q) if isinstance(q, Tensor) else None
    return (q, k, v) if dtype is None else (_in_dtype(q, dtype), _in_dtype(k, dtype), _in_dtype(v, dtype))
