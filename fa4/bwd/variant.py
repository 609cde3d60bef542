"""What the backwards of warp roles have in common at compile time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Int32

from ..core import variant
from ..pipeline.smem import Tile


@dataclass(frozen=True, slots=True)
class Variant(variant.Variant):
    """A kind of problem and how a backward works on it: `tile_m` queries a step, `cluster_tile_n` keys of a CTA (or of `ctas`
    that work as a pair), tiles of q, do, dk and dv, and `row_blocks`."""

    column_unit: ClassVar[int]  # products compute so many columns of a head dim, or a multiple
    cta_tile_n: ClassVar[int]  # keys of a CTA, of a pair too
    score_threads: ClassVar[int] = 256  # that have scores of these: eight warps, the CTA's first

    @property
    def columns(self) -> int:
        """head_dim as products compute it: tiles are zero past head_dim."""
        return -(-self.head_dim // self.column_unit) * self.column_unit

    @property
    def columns_v(self) -> int:
        return -(-self.head_dim_v // self.column_unit) * self.column_unit

    @property
    def k_tile(self) -> Tile:
        return Tile(self.cta_tile_n, self.head_dim, self.dtype.width)

    @property
    def v_tile(self) -> Tile:
        return Tile(self.cta_tile_n, self.head_dim_v, self.dtype.width)

    @property
    def rows_bytes(self) -> int:
        """A step's row statistics: two floats for each query."""
        return 2 * 4 * self.tile_m

    @property
    def descending(self) -> bool:
        """Whether CTAs take key blocks from last to first. In a deterministic causal problem that is the order in
        which blocks add to dQ: the last block, seen by the fewest queries, adds at its diagonal at once, the one before
        it follows a step behind, and nobody waits for long."""
        return self.deterministic and self.has_right

    def l2_group(self, n_blocks: Int32, seqlen_q: Int32, pairs: Int32) -> Int32 | None:
        """How many of all pairs of head and sequence advance together, see `core.order`; None for a sequence's."""
        return None

    def wave(self, n_blocks: Int32, l2_group: Int32 | None, pairs: Int32) -> Int32 | None:
        """How many blocks of each pair of a section begin together, if the order is one of waves, see `core.order`."""
        return None
