"""Run-time arguments of the sparse backward, and the context of its roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32

from ...pipeline.kernel import Context
from .config import SparseBackwardConfig


class SparseTensors(NamedTuple):
    """Tensors of a sparse backward. part: a key/value head of a list of a token.

    q, out, dout, dq: (tokens, query heads of a part, parts, columns). k, v: (rows, key/value heads of a list, columns).
    lse, dlse: (tokens, query heads) float32. rows: (tokens, lists, longest list) int32, rows of k and v; count:
    (tokens, lists) int32, how many of them are used. dk, dv: like k and v, float32 sums to add to; deterministic, with
    a row for each entry of the lists instead, in which those of used entries are stored. front: (1,) int32, at first 0,
    see `front`; None without one.
    """

    q: cute.Tensor
    out: cute.Tensor
    dout: cute.Tensor
    dq: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    lse: cute.Tensor
    dlse: cute.Tensor | None
    rows: cute.Tensor
    count: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    front: cute.Tensor | None


class SparseArguments(NamedTuple):
    """Run-time arguments of the kernel. tensors: q, out, dout and dq as matrices (rows, columns, parts, tokens). scale:
    softmax_scale. scale_log2: times log2(e)."""

    tensors: SparseTensors
    scale: Float32
    scale_log2: Float32


@dataclass(frozen=True, slots=True)
class SparseContext(Context):
    """Arguments of a role's body."""

    args: SparseArguments
    cfg: SparseBackwardConfig
