"""Allocation of device memory at low host cost."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from .torch_internals import guards

_has_fast_allocation = hasattr(guards, "_empty_strided_cuda")  # as this torch's compiled code allocates on CUDA


@functools.lru_cache(maxsize=4096)
def _row_major(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape as a plain tuple (the call below rejects torch.Size), and its strides."""
    return tuple(shape), tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a row-major tensor with unset values.

    On CUDA, `device` must be the current one. There this uses the allocation call of torch.compile's generated code, if
    this torch has it: a tenth of torch.empty's host time, which dominates a short call.
    """
    if _has_fast_allocation and device.type == "cuda":
        return guards._empty_strided_cuda(*_row_major(shape), dtype)
    return torch.empty(shape, dtype=dtype, device=device)


def maker(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that returns a new `empty(shape, dtype, device)` at each call, at still lower cost."""
    if _has_fast_allocation and device.type == "cuda":
        shape, strides = _row_major(shape)
        return lambda: guards._empty_strided_cuda(shape, strides, dtype)
    return lambda: torch.empty(shape, dtype=dtype, device=device)
