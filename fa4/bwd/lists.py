"""Backward of lists on any chip: its run-time arguments, the context of its roles, and the launch.

Each query has lists of rows of K and V. A CTA, or a pair, has the query heads that share a key/value head of a list, as
rows of its tiles, and iterates over blocks of listed keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..core.arguments import ALIGNMENT
from ..core.sequence import align_strides, as_matrices
from ..pipeline.kernel import Context, RoleKernel
from ..runtime import jit
from .lists_plan import ListsVariant


class SparseTensors(NamedTuple):
    """Tensors of a sparse backward. part: a key/value head of a list of a token.

    q, out, dout, dq: (tokens, query heads of a part, parts, columns). k, v: (rows, key/value heads of a list, columns).
    lse, dlse: (tokens, query heads) float32. rows: (tokens, lists, longest list) int32, rows of k and v; count:
    (tokens, lists) int32, how many of them are used. dk, dv: like k and v, float32 sums to add to; deterministic, with
    a row for each entry of the lists instead, in which those of used entries are stored. front: (1,) int32, at first 0,
    see `fa4.sm90.sparse.front`; None without one.
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
    softmax_scale. scale_log2: times log2(e). maps: TMA maps of the chip's kernel, if it has any."""

    tensors: SparseTensors
    scale: Float32
    scale_log2: Float32
    maps: Any = None


@dataclass(frozen=True, slots=True)
class SparseContext(Context):
    """Arguments of a role's body."""

    args: SparseArguments
    cfg: ListsVariant


Config = TypeVar("Config", bound=ListsVariant)


@dataclass(frozen=True, slots=True, repr=False)
class SparseBackwardKernel(RoleKernel[Config]):
    """The kernel and its launch. `maps` of a subclass returns its TMA maps."""

    @cute.jit
    def launch(
        self, tensors: SparseTensors, scale: Float32, scale_log2: Float32, cfg: cutlass.Constexpr, stream: Any
    ) -> None:
        """Add to tensors.dk and dv, and write dq."""
        by_rows = {name: as_matrices(getattr(tensors, name)) for name in ("q", "out", "dout", "dq")}
        by_keys = {name: align_strides(getattr(tensors, name)) for name in ("k", "v", "dk", "dv")}
        tokens, parts = cute.size(tensors.q, mode=[0]), cute.size(tensors.q, mode=[2])
        tensors = tensors._replace(**by_rows, **by_keys)
        args = SparseArguments(tensors, scale, scale_log2, self.maps(tensors, cfg))
        self.start(args, cfg, Int32(tokens * parts * cfg.row_tiles * cfg.ctas), stream)

    def maps(self, tensors: SparseTensors, cfg: Config) -> Any:
        return None

    def fake_args(self, cfg: Config) -> tuple:
        q, out, dout, dq = (jit.fake_tensor(cfg.dtype, 4, align=ALIGNMENT) for _ in range(4))
        k, v = (jit.fake_tensor(cfg.dtype, 3, align=ALIGNMENT) for _ in range(2))
        lse = jit.fake_tensor(Float32, 2, align=4)
        dlse = jit.fake_tensor(Float32, 2, align=4) if cfg.has_dlse else None
        rows, count = jit.fake_tensor(Int32, 3, align=4), jit.fake_tensor(Int32, 2, align=4)
        dk, dv = (jit.fake_tensor(Float32, 3, align=ALIGNMENT) for _ in range(2))
        front = jit.fake_tensor(Int32, 1, align=4) if cfg.has_front else None
        return SparseTensors(q, out, dout, dq, k, v, lse, dlse, rows, count, dk, dv, front), Float32(0), Float32(0)
