"""Blocks of query rows: what statistics, main kernel and finish of every chip hand each other, and in which layout.

Every sequence starts a new block of tile_m rows (`core.rows`). The rows of a block are those of one head, or those of
`packed` heads in turn (`core.sequence`). For each there are two statistics, which the main kernel adds:

    -lse * log2(e)     so that P = exp2(scale_log2 * S - lse * log2(e)); -inf for a row that sees nothing: P = 0
    -delta             so that dS = P (dP - delta), delta_i = sum_d dO_id O_id - dlse_i

or, for a main kernel that computes 2^e P with an e of its configuration (`weight_exponent`), -lse * log2(e) + e, and
-delta * 2^-e, so that dS = (2^e P) (2^-e dP - 2^-e delta).

and for each block a float32 sum of dQ, to which the blocks of keys add, in the layout that suits the main kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..core.arguments import Inputs
from ..core.constant import Constant
from ..core.order import Order, PackedOrder
from ..core.sequence import Lengths, as_columns, as_matrices, extent, modes_reversed
from ..core.traced import BlockTensors, ModTensors
from ..spec import ProblemSize, Saved

if TYPE_CHECKING:
    from .workspace import Workspace

THREADS = 256  # of the kernels around the main one


@dataclass(frozen=True, slots=True)
class Placement(Constant):
    """Where a main kernel adds up a block's dQ, tile_m rows of `columns` float32.

    rows: 1, or as many (2 or 4) rows of a column as are neighbours. Of 8 neighbouring columns (and `rows` rows) the
    places come in runs of four, or of two, wherever the 8 start.
    """

    tile_m: int
    columns: int
    rows: ClassVar[int] = 1

    @property
    def elements(self) -> int:
        return self.tile_m * self.columns

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        """The place of (row, column first + within) from the block's start; first is a multiple of 32 * rows and
        within is less than that."""
        raise NotImplementedError


@dataclass(frozen=True)
class RowBlocks(Constant):
    """What the code of statistics and finish depends on.

    packed: heads that are rows of one block. turns: counters of a block, see `semaphores`; 0 for none. first_stores: whoever
    is first, in the order of additions or by chance, stores what others add to, so that sums need not be cleared; no
    sum is read whose (first) counter is 0. list_rows: rows of a block mask's block, if its lists say that order;
    else 0. pdl: the three kernels overlap by programmatic launch. weight_exponent: e, see above. chained: a block has
    several sums, each with counters of its own, and dQ is their sum in the order of their numbers.
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int
    tile_m: int
    placement: Placement
    varlen: bool
    has_sink: bool
    has_dlse: bool
    packed: int = 1
    semaphores: int = 0
    first_stores: bool = False
    list_rows: int = 0
    pdl: bool = False
    weight_exponent: int = 0
    chained: bool = False

    def arranged(self, statistics: cute.Tensor) -> cute.Tensor:
        """The workspace of row statistics, (tile_m, 2, blocks, heads), its rows in the order in which threads of the
        main kernel load them."""
        return statistics


@dataclass(frozen=True)
class RowTensors:
    """The run-time arguments of statistics and finish.

    out, dout, dq: `core.sequence.as_matrices`, lse, dlse, dsink: `as_columns`, of `packed` heads. sink: (heads_q,).
    dsink: each row's term of dsink, whose sum over a head's rows is the gradient.
    statistics: (tile_m, 2, blocks, heads). dq_sum: (elements, blocks, heads). turns: (blocks * turns, heads) int32;
    these two have a last mode of chains if there are several.
    ranks: (key blocks, blocks, heads) int32, see `ranks`. of_queries: see `core.traced.ModTensors`. order: a tile for
    each row block of each sequence.
    """

    out: cute.Tensor
    dout: cute.Tensor
    dq: cute.Tensor
    lse: cute.Tensor
    dlse: cute.Tensor | None
    sink: cute.Tensor | None
    dsink: cute.Tensor | None
    statistics: cute.Tensor
    dq_sum: cute.Tensor
    semaphores: cute.Tensor | None
    ranks: cute.Tensor | None
    of_queries: BlockTensors | None
    lengths: Lengths
    order: Order | PackedOrder
    scale: Float32

    @staticmethod
    def of(
        inputs: Inputs,
        saved: Saved,
        dq: cute.Tensor,
        workspace: Workspace,
        scale: Float32,
        sizes: ProblemSize,
        mods: ModTensors | None,
        cfg: RowBlocks,
    ) -> RowTensors:
        """From what a launch gets."""
        out, dout, dq = (as_matrices(x, cfg.packed) for x in (saved.out, saved.dout, dq))
        of_rows = (saved.lse, saved.dlse, workspace.dsink)
        lse, dlse, dsink = (None if x is None else as_columns(x, cfg.packed) for x in of_rows)
        statistics, dq_sum, semaphores, ranks = (None if x is None else modes_reversed(x) for x in workspace[:4])
        of_queries = None if mods is None else mods.of_queries
        heads = cute.size(dq, mode=[2])
        order: Order | PackedOrder = Order(
            cute.ceil_div(sizes.max_seqlen_q * cfg.packed, cfg.tile_m), heads, sizes.batch
        )
        if cfg.varlen:
            order = PackedOrder(cfg.tile_m, cfg.packed, inputs.lengths.cu_seqlens_q, extent(out), heads, heads, False)
        lengths = inputs.lengths.bounded(sizes.max_seqlen_q, sizes.max_seqlen_k)
        return RowTensors(
            out, dout, dq, lse, dlse, inputs.sink, dsink, statistics, dq_sum, semaphores, ranks, of_queries, lengths, order,
            scale,
        )  # fmt: skip
