"""What launches and compilation of a kernel have to agree on: the order of its arguments, stand-ins for tensors."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from torch import Tensor

from .. import jit
from ..spec import AttentionInputs, AttentionSpec

LOG2_E = math.log2(math.e)
ALIGNMENT = 16  # bytes that rows of q, k, v, out and dout start at multiples of; see `fa4.plan.Layout`


def compile_key(kernel: str, record: Any) -> tuple:
    """Plain values that tell the configurations of a kernel apart, for `jit.compiled`."""
    return (kernel, *(_plain(getattr(record, field.name)) for field in dataclasses.fields(record)))


def _plain(value: Any) -> Any:
    if isinstance(value, type):
        return str(value)
    return dataclasses.astuple(value) if dataclasses.is_dataclass(value) else value


def lengths(inputs: AttentionInputs) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: in the order kernels take them."""
    return inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_q, inputs.seqused_k


def windows(spec: AttentionSpec) -> tuple[int, int]:
    """window_left, window_right as numbers; what an open side says is not read."""
    return spec.window_left or 0, spec.window_right or 0


def fake_lengths(kernel: Any) -> list:
    """Stand-ins for `lengths` where a kernel is compiled: None for those that it is without, as its fields say."""
    from cutlass import Int32

    present = (kernel.varlen, kernel.varlen, kernel.has_seqused_q, kernel.has_seqused_k)
    return [jit.fake_tensor(Int32, 1, align=4) if there else None for there in present]


def fake_matrices(cfg: Any, count: int) -> list:
    """Stand-ins for tensors like q: (batch, rows, heads, dim), varlen without the batch."""
    return [jit.fake_tensor(cfg.dtype, 3 if cfg.varlen else 4, align=ALIGNMENT) for _ in range(count)]


def fake_rows(cfg: Any, present: bool = True) -> Any:
    """Stand-in for a tensor like lse: (batch, heads, rows), varlen without the batch."""
    from cutlass import Float32

    return jit.fake_tensor(Float32, 2 if cfg.varlen else 3, align=4) if present else None


def fake_sink(cfg: Any) -> Any:
    """Stand-in for the sink of each query head."""
    from cutlass import Float32

    return jit.fake_tensor(Float32, 1, align=4) if cfg.has_sink else None
