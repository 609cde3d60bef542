"""Compile-time configuration shared by all warp-specialised backward kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ..core import variant
from ..pipeline.smem import Tile
from .blocks import RowBlocks

if TYPE_CHECKING:
    from cutlass import Int32


class BackwardOptions(variant.Variant):
    """Kind of problem of a backward on any chip."""

    __slots__ = ()

    @property
    def reads_query_lists(self) -> bool:
        """Whether kernels also read the block mask's lists of query blocks, beside those of key blocks."""
        return self.ordered_by_lists

    if TYPE_CHECKING:  # defined by each chip's configuration; see `Variant.ctas`

        @property
        def tile_m(self) -> int:
            """Queries per step."""

        @property
        def cluster_tile_n(self) -> int:
            """Keys per CTA, or per pair if `ctas` is 2."""

        @property
        def cta_tile_n(self) -> int:
            """Keys per CTA, also in a pair."""

        @property
        def score_threads(self) -> int:
            """Threads that hold scores: the first threads of the CTA."""

        @property
        def row_blocks(self) -> RowBlocks:
            """Configuration of the kernels before and after the main kernel."""


@dataclass(frozen=True, slots=True)
class BackwardVariant(BackwardOptions):
    """Kind of problem, and tiling of the backward."""

    column_unit: ClassVar[int]  # MMAs compute a multiple of this number of head-dim columns
    cta_tile_n: ClassVar[int]  # keys per CTA, also in a pair
    score_threads: ClassVar[int] = 256  # threads that hold scores: the first eight warps of the CTA

    if TYPE_CHECKING:  # as in `BackwardOptions`

        @property
        def q_tile(self) -> Tile: ...

        @property
        def do_tile(self) -> Tile: ...

        @property
        def dk_tile(self) -> Tile: ...

        @property
        def dv_tile(self) -> Tile: ...

    @property
    def columns(self) -> int:
        """head_dim rounded up to `column_unit`: tiles are zero past head_dim."""
        return -(-self.head_dim // self.column_unit) * self.column_unit

    @property
    def columns_v(self) -> int:
        return -(-self.head_dim_v // self.column_unit) * self.column_unit

    @property
    def k_tile(self) -> Tile:
        return Tile(self.cta_tile_n, self.head_dim, self.operand_bits)

    @property
    def v_tile(self) -> Tile:
        return Tile(self.cta_tile_n, self.head_dim_v, self.operand_bits)

    @property
    def dq_tile(self) -> Tile | None:
        """Tile of dq that the main kernel stores by TMA; None if it adds to sums only."""
        return None

    @property
    def rows_bytes(self) -> int:
        """Bytes of the row statistics of a step: two float32 per query."""
        return 2 * 4 * self.tile_m

    @property
    def descending(self) -> bool:
        """True if CTAs process key blocks from last to first. In a deterministic causal problem key blocks add to dQ in
        this order. The last key block has the fewest visible queries and adds at its diagonal at once; each earlier
        block follows one step behind, so waits are short."""
        return self.deterministic and self.has_right

    def l2_group(self, n_blocks: Int32, seqlen_q: Int32, pairs: Int32) -> Int32 | None:
        """(head, sequence) pairs of an L2 swizzle group, see `core.order`; None: the heads of one sequence."""
        return None

    def wave(self, n_blocks: Int32, l2_group: Int32 | None, pairs: Int32) -> Int32 | None:
        """Blocks of each pair of an L2 group that start together, see `core.order`; None for an order without waves."""
        return None
