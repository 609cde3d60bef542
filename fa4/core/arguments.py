"""Records of kernel arguments, and fake arguments for compilation. Launch and compilation must agree on them.

A record is a nested tuple: a launch may pass any tuple instead of a record.
"""

from __future__ import annotations

from typing import NamedTuple, get_type_hints

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8

from ..runtime import jit
from .sequence import Lengths
from .variant import Variant

ALIGNMENT = 16  # bytes; alignment of the rows of q, k, v, out and dout, see `fa4.runtime.plan.Layout`


class Inputs(NamedTuple):
    """The tensors of a problem, in the order of `spec.AttentionInputs`. q, k, v: (batch, rows, heads, dim), or varlen
    (rows, heads, dim), last stride 1; those of 8 and 4 bits as uint8. sink: (heads_q,) float32. Then `Lengths`."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    sink: cute.Tensor | None
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    seqused_q: cute.Tensor | None
    seqused_k: cute.Tensor | None

    @property
    def lengths(self) -> Lengths:
        return Lengths(*self[4:])

    @staticmethod
    def fake(cfg: Variant) -> Inputs:
        """Return fake arguments for compilation; None for tensors that the `Variant` does not have."""
        q = jit.fake_tensor(Uint8 if cfg.operands is not None else cfg.dtype, 3 if cfg.varlen else 4, align=ALIGNMENT)
        kv_dtype = Uint8 if cfg.has_bytes else cfg.dtype
        k, v = (jit.fake_tensor(kv_dtype, 3 if cfg.varlen_k else 4, align=ALIGNMENT) for _ in range(2))
        sink = jit.fake_tensor(Float32, 1, align=4) if cfg.has_sink else None
        present = (cfg.varlen, cfg.varlen_k, cfg.has_seqused_q, cfg.has_seqused_k)
        return Inputs(q, k, v, sink, *(jit.fake_tensor(Int32, 1, align=4) if exists else None for exists in present))


def fake_matrices(cfg: Variant, count: int) -> list:
    """Return fake tensors like q: (batch, rows, heads, dim), varlen without the batch."""
    return [jit.fake_tensor(cfg.dtype, 3 if cfg.varlen else 4, align=ALIGNMENT) for _ in range(count)]


def fake_results(cfg: Variant, is_split: bool) -> tuple:
    """Return a fake out and lse of a forward; with split-KV both are float32, with a leading axis of parts."""
    if not is_split:
        return *fake_matrices(cfg, 1), fake_rows(cfg)
    rank = 3 if cfg.varlen else 4
    return jit.fake_tensor(Float32, rank + 1), jit.fake_tensor(Float32, rank, align=4)


def fake_rows(cfg: Variant, present: bool = True) -> cute.Tensor | None:
    """Return a fake tensor like lse: (batch, heads, rows), varlen without the batch."""
    return jit.fake_tensor(Float32, 2 if cfg.varlen else 3, align=4) if present else None


def fake_numbers(record: type[tuple]) -> tuple:
    """Return a record of fake Int32 and Float32 values."""
    return record(*(kind(0) for kind in get_type_hints(record).values()))
