"""Run-time arguments of the kernels before and after the main kernel of a backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import Float32

from ..core.arguments import Inputs
from ..core.order import Order, PackedOrder, tile_order
from ..core.sequence import Lengths, as_columns, as_matrices, extent, modes_reversed
from ..core.traced import BlockTensors, ModTensors
from ..runtime.spec import ProblemSize, Saved
from .blocks import RowBlocks

if TYPE_CHECKING:
    from .workspace import Workspace


@dataclass(frozen=True)
class RowTensors:
    """Run-time arguments of the statistics and finish kernels.

    out, dout, dq: `core.sequence.as_matrices`; lse, dlse, dsink: `as_columns`; both of `packed` heads.
    sink: (heads_q,). dsink: the term of each row; the gradient is the sum over the rows of a head.
    statistics: (tile_m, 2, blocks, heads). dq_sum: (elements, blocks, heads). semaphores: (blocks * semaphores, heads)
    int32. dq_sum and semaphores have a last mode of chains if `chained`.
    ranks: (key blocks, blocks, heads) int32, see `ranks`. of_queries: see `core.traced.ModTensors`. order: one tile per
    row block of each sequence. factors: of `spec.GradientOperands`. key_sums: (elements, key blocks, heads_kv, batch,
    parts), see `kernels.key_sums`.
    """

    out: cute.Tensor
    dout: cute.Tensor
    dq: cute.Tensor
    lse: cute.Tensor
    dlse: cute.Tensor | None
    sink: cute.Tensor | None
    dsink: cute.Tensor | None
    statistics: cute.Tensor
    dq_sum: cute.Tensor | None
    semaphores: cute.Tensor | None
    ranks: cute.Tensor | None
    of_queries: BlockTensors | None
    lengths: Lengths
    order: Order | PackedOrder
    scale: Float32
    factors: cute.Tensor | None
    key_sums: cute.Tensor | None

    @staticmethod
    def of(
        inputs: Inputs,
        saved: Saved,
        dq: cute.Tensor,
        workspace: Workspace,
        scale: Float32,
        sizes: ProblemSize,
        mods: ModTensors | None,
        factors: cute.Tensor | None,
        cfg: RowBlocks,
    ) -> RowTensors:
        """Convert the arguments of a launch."""
        out, dout, dq = (as_matrices(x, cfg.packed) for x in (saved.out, saved.dout, dq))
        row_values = (saved.lse, saved.dlse, workspace.dsink)
        lse, dlse, dsink = (None if x is None else as_columns(x, cfg.packed) for x in row_values)
        statistics, dq_sum, semaphores, ranks = (None if x is None else modes_reversed(x) for x in workspace[:4])
        of_queries = None if mods is None else mods.of_queries
        heads, cu_seqlens = cute.size(dq, mode=[2]), inputs.lengths.cu_seqlens_q
        l2_group = heads if cfg.varlen else None  # without a group, the heads of a sequence advance together too
        order = tile_order(
            cfg.tile_m, cfg.packed, sizes.max_seqlen_q, extent(out), cu_seqlens, heads, sizes.batch, l2_group
        )
        lengths = inputs.lengths.bounded(sizes.max_seqlen_q, sizes.max_seqlen_k)
        return RowTensors(
            out, dout, dq, lse, dlse, inputs.sink, dsink, statistics, dq_sum, semaphores, ranks, of_queries, lengths,
            order, scale, factors, None if workspace.key_sums is None else modes_reversed(workspace.key_sums),
        )  # fmt: skip
