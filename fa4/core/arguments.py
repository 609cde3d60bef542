"""What launches and compilation of a kernel have to agree on: records of arguments, and stand-ins for their tensors.

Records are nested tuples to the caller, too: a launch may pass any tuple in a record's place.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_type_hints

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8

from .. import jit
from ..spec import AttentionSpec
from .sequence import Lengths

ALIGNMENT = 16  # bytes that rows of q, k, v, out and dout start at multiples of; see `fa4.plan.Layout`


class Inputs(NamedTuple):
    """The tensors of a problem, as `spec.AttentionInputs` begins: q, k, v (batch, rows, heads, dim), or varlen (rows,
    heads, dim), the last stride 1, k and v of 8-bit numbers as bytes; sink (heads_q,) float32; and `Lengths`."""

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
    def fake(cfg: Any) -> Inputs:
        """Stand-ins for compilation; None for what a `Variant` is without."""
        (q,) = fake_matrices(cfg, 1)
        of_k = Uint8 if cfg.has_bytes else cfg.dtype
        k, v = (jit.fake_tensor(of_k, 3 if cfg.varlen_k else 4, align=ALIGNMENT) for _ in range(2))
        sink = jit.fake_tensor(Float32, 1, align=4) if cfg.has_sink else None
        present = (cfg.varlen, cfg.varlen_k, cfg.has_seqused_q, cfg.has_seqused_k)
        return Inputs(q, k, v, sink, *(jit.fake_tensor(Int32, 1, align=4) if there else None for there in present))


def fake_matrices(cfg: Any, count: int) -> list:
    """Stand-ins for tensors like q: (batch, rows, heads, dim), varlen without the batch."""
    return [jit.fake_tensor(cfg.dtype, 3 if cfg.varlen else 4, align=ALIGNMENT) for _ in range(count)]


def fake_results(cfg: Any) -> tuple:
    """Stand-ins for a forward's out and lse; of split keys both float32, with an axis of parts in front."""
    if not cfg.split:
        return *fake_matrices(cfg, 1), fake_rows(cfg)
    rank = 3 if cfg.varlen else 4
    return jit.fake_tensor(Float32, rank + 1), jit.fake_tensor(Float32, rank, align=4)


def fake_rows(cfg: Any, present: bool = True) -> Any:
    """Stand-in for a tensor like lse: (batch, heads, rows), varlen without the batch."""
    return jit.fake_tensor(Float32, 2 if cfg.varlen else 3, align=4) if present else None


def fake_numbers(record: type[tuple]) -> tuple:
    """Stand-ins for a record of Int32 and Float32."""
    return record(*(kind(0) for kind in get_type_hints(record).values()))


def windows(spec: AttentionSpec) -> tuple[int, int]:
    """window_left, window_right as numbers; what an open side says is not read."""
    return spec.window_left or 0, spec.window_right or 0
