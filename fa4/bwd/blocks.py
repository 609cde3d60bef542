"""Blocks of query rows: data and layouts shared by the statistics, main and finish kernels of every chip.

Every sequence starts a new block of tile_m rows (`core.rows`). The rows of a block belong to one head, or to `packed`
interleaved heads (`core.sequence`). Each row has two statistics, which the main kernel adds:

    -lse * log2(e)     so that P = exp2(scale_log2 * S - lse * log2(e)); -inf for a row without visible key: P = 0
    -delta             so that dS = P (dP - delta), delta_i = sum_d dO_id O_id - dlse_i

A main kernel with a `weight_exponent` e computes 2^e P. Its statistics are -lse * log2(e) + e and -delta * 2^-e, so
that dS = (2^e P) (2^-e dP - 2^-e delta). One of 8-bit operands has factors of delta instead of 2^-e, see
`spec.GradientOperands`.

Each block has a float32 sum of dQ, to which the key blocks add, in a layout chosen by the main kernel; none if a main
kernel computes all of a dQ block itself and stores it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..core.constant import Constant
from ..runtime import jit
from ..runtime.dsl import cute, cutlass
from ..runtime.spec import Operands

if TYPE_CHECKING:
    from cutlass import Int32

THREADS = 256  # per CTA of the statistics and finish kernels
KEYS = 128  # of a block that CTAs share


@dataclass(frozen=True, slots=True)
class Placement(Constant):
    """Layout of a block's dQ sum: tile_m rows of `columns` float32.

    rows: number of consecutive rows of a column that are contiguous (1, 2 or 4). The offsets of 8 consecutive columns
    (times `rows` rows) form contiguous runs of four, or of two, for every start column.
    """

    tile_m: int
    columns: int
    rows: ClassVar[int] = 1

    @property
    def elements(self) -> int:
        return self.tile_m * self.columns

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        """Offset of (row, column first + within) from the start of the block; first is a multiple of 32 * rows, and
        within < 32 * rows."""
        raise NotImplementedError


@dataclass(frozen=True)
class RowBlocks(Constant):
    """Compile-time configuration of the statistics and finish kernels.

    placement: None without dQ sums; then no finish kernel runs. packed: heads packed into the rows of a block.
    semaphores: semaphores per block, see `semaphores`; 0 for none.
    first_stores: the first writer of a sum (by order or by chance) stores and the others add, so that sums need no zero
    fill; a sum whose (first) semaphore is 0 is not read. list_rows: rows of a block-mask block, if its lists define the
    order of additions; else 0. pdl: the three kernels overlap by programmatic dependent launch. weight_exponent: e,
    see above. operands: q, k and v are 8-bit, and `group` heads share factors. chained: a block has several sums
    (chains) with their own semaphores; dQ adds them in index order. key_columns: columns of dV and of dK in the sums
    of CTAs that share key blocks, see `kernels.key_sums`; None if no CTAs do. finishes: a finish kernel converts the dQ
    sums; else the main kernel stores dq.
    """

    torch_dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    tile_m: int
    placement: Placement | None
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
    key_columns: tuple[int, int] | None = None
    finishes: bool = True
    operands: Operands | None = None
    group: int = 1

    @classmethod
    def of(cls, cfg: Any, placement: Placement | None, packed: int = 1, **others: Any) -> RowBlocks:
        """Return the row blocks of a main kernel with configuration `cfg`."""
        return cls(
            cfg.torch_dtype, cfg.head_dim, cfg.head_dim_v, cfg.tile_m, placement, cfg.varlen, cfg.has_sink,
            cfg.has_dlse, packed, list_rows=cfg.mods.block[0] * packed if cfg.ordered_by_lists else 0,
            operands=cfg.operands, group=cfg.group, **others,
        )  # fmt: skip

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """DSL type of `torch_dtype`; imports CuTe DSL."""
        return jit.dsl_dtype(self.torch_dtype)

    @property
    def key_sums(self) -> int:
        """Floats of a block of KEYS keys in the sums of a CTA; 0 without such sums."""
        return 0 if self.key_columns is None else KEYS * sum(self.key_columns)

    def permute_statistics(self, statistics: cute.Tensor) -> cute.Tensor:
        """Return the row statistics, (tile_m, 2, blocks, heads), with rows permuted to the load order of the main
        kernel."""
        return statistics
