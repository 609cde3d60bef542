"""What the plans of forward and backward share: tensors that TMA can step through, what compilation is asked for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import Tensor

from .. import jit
from ..fwd.arguments import aligned

LOG2_E = math.log2(math.e)
TMA_ALIGN = 16  # bytes that base addresses and strides of a TMA map are multiples of


def addressable(x: Tensor) -> Tensor:
    """x itself if TMA can step through it, else a copy: of rows that are not aligned, or of an expanded axis, whose
    stride is 0."""
    x = aligned(x)
    steps = [stride for stride, extent in zip(x.stride(), x.shape) if extent > 1]
    return x if all(steps) else x.contiguous()


def compile_key(kernel: str, cfg: Any) -> tuple:
    """Plain values that tell the configurations of a kernel apart, for `jit.compiled`."""
    values = (getattr(cfg, field.name) for field in dataclasses.fields(cfg))
    return (kernel, *(str(x) if isinstance(x, type) else x for x in values))


def fake_matrices(cfg: Any, count: int) -> list:
    """Stand-ins for tensors like q: (batch, rows, heads, dim), varlen without the batch."""
    return [jit.fake_tensor(cfg.dtype, 3 if cfg.varlen else 4, align=TMA_ALIGN) for _ in range(count)]


def fake_rows(cfg: Any, present: bool = True) -> Any:
    """Stand-in for a tensor like lse: (batch, heads, rows), varlen without the batch."""
    from cutlass import Float32

    return jit.fake_tensor(Float32, 2 if cfg.varlen else 3, align=4) if present else None


def fake_sink(cfg: Any) -> Any:
    """Stand-in for the sink of each query head."""
    from cutlass import Float32

    return jit.fake_tensor(Float32, 1, align=4) if cfg.has_sink else None
