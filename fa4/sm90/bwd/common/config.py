"""Tiles and products that both kernels share, and the context of their roles.

All products work on transposed scores: S^T = K Q^T has keys as rows, 64 for a warpgroup. P^T and dS^T, rounded to 16
bits in registers, are the left operands of dV += P^T dO and dK += dS^T Q.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ....bwd.blocks import Placement, RowBlocks
from ....core.rows import Rows
from ....pipeline.smem import Tile
from ....runtime.dsl import cute
from ...wgmma import ROWS, Major, SmemOperand, Wgmma
from .launch_order import LaunchOrder

if TYPE_CHECKING:
    from cutlass import Int32

    from ....pipeline.tma import TmaTile

CONSUMERS = 2  # warpgroups
WARPGROUP = 128  # threads
PANEL_COLUMNS = Tile(ROWS, 1).panel_columns
BARRIER_BYTES = 512  # upper bound for all mbarriers, in the smem budget


def fragment_offset(row: Int32 | int, column: Int32 | int) -> Int32 | int:
    """Return the offset of an accumulator element in a warpgroup's part of a dQ sum.

    Four elements of each thread are contiguous, then the next four. Element i of a thread is column i % 2 of its pair
    in the i / 4-th eight columns, in row i / 2 % 2 of its two rows; see `fragment`.
    """
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    return column // 8 * (4 * WARPGROUP) + thread * 4 + row // 8 % 2 * 2 + column % 2


@dataclass(frozen=True, slots=True)
class ByQueries(Placement):
    """Layout of dQ: a consumer has 64 queries with all columns."""

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        return row // ROWS * (ROWS * self.columns) + fragment_offset(row % ROWS, first + within)


class ThreadOrderedBlocks(RowBlocks):
    """Row blocks with statistics in the order in which threads of `compute` load them."""

    def permute_statistics(self, statistics: cute.Tensor) -> cute.Tensor:
        """Make the four of every 16 queries that belong to one thread contiguous: 2j, 2j + 1, 2j + 8, 2j + 9."""
        shape, stride = statistics.shape, statistics.stride
        layout = cute.make_layout(((2, 4, 2, self.tile_m // 16), *shape[1:]), stride=((1, 4, 2, 16), *stride[1:]))
        return cute.make_tensor(statistics.iterator, layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90BackwardSteps(LaunchOrder):
    """Loop of a CTA over query blocks: what both kernels share. The fields are the compile key.

    q_stages, stages, ds_stages: see `tiles`. weight_exponent: see `bwd.blocks`.

    Raises:
        ValueError: the tiles do not fit in shared memory; dS has one stage although it is read one step late; CTAs
            cannot share key blocks.
    """

    q_stages: int
    stages: int
    ds_stages: int
    smem_bytes: int
    weight_exponent: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.ds_stages < 2:
            raise ValueError("ds_stages is 1, expected 2 at least: dQ is computed a step after dS")
        has_one_length = not self.lengths_vary and self.mods is None
        if self.parted and (not has_one_length or self.has_left or (self.deterministic and self.has_right)):
            raise ValueError(
                "parts of key blocks: expected sequences of one length, without traced functions and left bounds, and "
                "no deterministic order along a right bound"
            )
        is_band_in_order = has_one_length and self.has_left and self.has_right and self.deterministic
        if self.last_finishes and (not is_band_in_order or self.dq_tile is None):
            raise ValueError(
                "last_finishes: expected additions in order, left and right bounds, sequences of one length, no traced "
                "functions, and a dQ of 64 queries for each warpgroup with 32 columns or more"
            )
        if self.smem_used > self.smem_bytes:
            raise ValueError(
                f"{self.tile_m} x {self.cluster_tile_n} tiles hold {self.smem_used} bytes, there are {self.smem_bytes}"
            )

    @property
    def row_blocks(self) -> RowBlocks:
        """Configuration of the kernels before and after the main kernel."""
        return ThreadOrderedBlocks.of(
            self, self.placement, semaphores=self.semaphores, first_stores=self.semaphores > 0, pdl=True,
            weight_exponent=self.weight_exponent, chained=self.chained,
            key_columns=(self.columns_v, self.columns) if self.parted else None, finishes=not self.last_finishes,
        )  # fmt: skip

    @property
    def statistics_ahead(self) -> bool:
        """True if registers can hold a statistic of all of a thread's queries beside its accumulators."""
        return False

    @property
    def ds_tile(self) -> Tile:
        """dS of a step."""
        raise NotImplementedError

    @property
    def smem_used(self) -> int:
        """Bytes of shared memory of a CTA."""
        raise NotImplementedError

    @property
    def semaphores(self) -> int:
        """Counters per query block."""
        raise NotImplementedError

    @property
    def placement(self) -> Placement:
        """Layout of a block's dQ sum."""
        raise NotImplementedError

    def cta_share(self, tma: TmaTile, block: Int32, rank: Int32, rows: Rows) -> Int32:
        """Return the tile that CTA `rank` loads of a block of rows: all of it."""
        return block

    @property
    def q_tile(self) -> Tile:
        return Tile(self.tile_m, self.head_dim)

    @property
    def do_tile(self) -> Tile:
        return Tile(self.tile_m, self.head_dim_v)

    @property
    def dk_tile(self) -> Tile:
        """dK of 64 keys, which a consumer stores by itself."""
        return Tile(ROWS, self.head_dim)

    @property
    def dv_tile(self) -> Tile:
        return Tile(ROWS, self.head_dim_v)

    @property
    def scores(self) -> Wgmma:
        """S^T = K Q^T."""
        q = SmemOperand(self.q_tile, Major.K, self.q_stages, self.q_tile.nbytes)
        return Wgmma(self.dtype, n=self.tile_m, k=self.columns, b=q, a=SmemOperand(self.k_tile, Major.K))

    @property
    def dp(self) -> Wgmma:
        """dP^T = V dO^T."""
        do = SmemOperand(self.do_tile, Major.K, self.stages, self.do_tile.nbytes)
        return Wgmma(self.dtype, n=self.tile_m, k=self.columns_v, b=do, a=SmemOperand(self.v_tile, Major.K))

    @property
    def dv(self) -> Wgmma:
        """dV += P^T dO, P^T from registers."""
        do = SmemOperand(self.do_tile, Major.MN, self.stages, self.do_tile.nbytes)
        return Wgmma(self.dtype, n=self.columns_v, k=self.tile_m, b=do)

    @property
    def dk(self) -> Wgmma:
        """dK += dS^T Q, dS^T from registers."""
        q = SmemOperand(self.q_tile, Major.MN, self.q_stages, self.q_tile.nbytes)
        return Wgmma(self.dtype, n=self.columns, k=self.tile_m, b=q)
