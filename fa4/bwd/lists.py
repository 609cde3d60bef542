"""Backward of lists on any chip: its run-time arguments, the work of a CTA or a pair, and the launch.

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
from .lists_plan import SparseBackwardOptions


class SparseTensors(NamedTuple):
    """Tensors of a sparse backward. part: a key/value head of a list of a token.

    q, out, dout, dq: (tokens, query heads of a part, parts, columns). k, v: (rows, key/value heads of a list, columns).
    lse, dlse: (tokens, query heads) float32. rows: (tokens, lists, longest list) int32, rows of k and v; count:
    (tokens, lists) int32, how many of them are used. dk, dv: like k and v, float32 sums to add to; deterministic, with
    a row for each entry of the lists instead, in which those of used entries are stored.
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
    cfg: SparseBackwardOptions


class SparseWork(NamedTuple):
    """first: row of the tile's first query head. head: key/value head of the list. count: keys of the list."""

    token: Int32
    part: Int32
    first: Int32
    list: Int32
    head: Int32
    count: Int32

    def blocks(self, context: SparseContext) -> Int32:
        return cute.ceil_div(self.count, context.cfg.tile_n)

    def key_row(self, context: SparseContext, key: Int32) -> Int32:
        """Return the row of k and v of a listed key; of any valid row if the list has no such key."""
        last = cutlass.max(self.count - 1, 0)
        return context.args.tensors.rows[self.token, self.list, cutlass.min(key, last)]

    def target_row(self, context: SparseContext, key: Int32) -> Int32:
        """Return the row of dk and dv for a listed key, or any row if the list has no such key."""
        if not context.cfg.deterministic:
            return self.key_row(context, key)
        lists, longest = context.args.tensors.rows.shape[1:]
        return (self.token * lists + self.list) * longest + key

    def matrix(self, x: cute.Tensor) -> cute.Tensor:
        """Return the part of q, out, dout or dq: (rows, columns)."""
        return x[None, None, self.part, self.token]


def work_tile(context: SparseContext) -> SparseWork:
    """Return the work of this CTA or pair."""
    cfg, t = context.cfg, context.args.tensors
    index, per = Int32(cute.arch.block_idx()[0]) // cfg.ctas, cute.size(t.k, mode=[1])
    tile, index = index % cfg.row_tiles, index // cfg.row_tiles
    parts = cute.size(t.q, mode=[2])
    part, token = index % parts, index // parts
    list_ = part // per
    return SparseWork(token, part, tile * cfg.tile_m, list_, part % per, t.count[token, list_])


Config = TypeVar("Config", bound=SparseBackwardOptions)


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
        return SparseTensors(q, out, dout, dq, k, v, lse, dlse, rows, count, dk, dv), Float32(0), Float32(0)
