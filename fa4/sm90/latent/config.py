"""Compile-time configuration of the latent forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ...fwd.variant import FetchingVariant, OutStore
from ...pipeline.smem import Tile
from ..wgmma import ROWS, Major, SmemOperand, Wgmma

HALVES = 2  # warpgroups that compute; each has half of the columns of O
STAGES = 2  # key blocks in shared memory: one of each warpgroup
TILE_N = 64
GATHERERS = 2  # warps that copy the scattered rows of a key block


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(FetchingVariant):
    """The fields are the compile key. A work tile has 64 rows; V has whole panels of columns for each half.

    persistent: a CTA takes several work tiles, and loads of a tile begin while the one before it is stored.
    """

    persistent: bool

    ctas: ClassVar[int] = 1
    tma_ctas: ClassVar[int] = 1
    consumers: ClassVar[int] = 1  # that share a tile's rows, see `row_tile`
    has_packed_order: ClassVar[bool] = False
    seq_bounded_q: ClassVar[bool] = False
    out_store: ClassVar[OutStore] = OutStore.DIRECT
    loads_v: ClassVar[bool] = False

    @property
    def rows(self) -> int:
        return ROWS

    @property
    def snake(self) -> bool:
        return self.persistent

    @property
    def seq_bounded_o(self) -> bool:
        return self.varlen

    def sharers(self, name: str) -> int:
        return 1

    @property
    def q_tile(self) -> Tile:
        return Tile(ROWS, self.head_dim, slots=self.q_slots)

    @property
    def q_step(self) -> int:
        return self.q_tile.nbytes

    @property
    def k_tile(self) -> Tile:
        """Key block in shared memory."""
        return Tile(self.tile_n, self.head_dim, pieces=self.pieces)

    @property
    def v_tile(self) -> Tile:
        return self.k_tile

    @property
    def p_tile(self) -> Tile:
        return Tile(ROWS, self.tile_n)

    @property
    def half_panels(self) -> int:
        """Panels of a key block that are V of one warpgroup; the first are those of V."""
        return self.half_columns // self.k_tile.panel_columns

    @property
    def p_offset(self) -> int:
        """Bytes from a key block to its P, in the panel behind the columns of V. The tail is there before."""
        return HALVES * self.half_panels * self.k_tile.panel_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of a key block with its P."""
        return self.p_offset + self.p_tile.nbytes

    @property
    def has_tail(self) -> bool:
        """True if K has a panel that is not V's."""
        return self.k_tile.panels > HALVES * self.half_panels

    @property
    def part_bounds(self) -> tuple[int, ...]:
        """Panel at which each part of a key block begins, and the end: V of either warpgroup and, if K has one, the
        tail."""
        sides = 0, self.half_panels, HALVES * self.half_panels
        return (*sides, self.k_tile.panels) if self.has_tail else sides

    @property
    def half_columns(self) -> int:
        """Columns of O of a warpgroup."""
        return self.head_dim_v // HALVES

    @property
    def qk(self) -> Wgmma:
        """S = Q K^T."""
        q = SmemOperand(self.q_tile, Major.K)
        return Wgmma(self.v_dtype, n=self.tile_n, k=self.head_dim, b=self._kv(Major.K), a=q)

    @property
    def pv(self) -> Wgmma:
        """O += P V, for half of the columns; the warpgroup's own P, from registers."""
        return Wgmma(self.v_dtype, n=self.half_columns, k=self.tile_n, b=self._kv(Major.MN))

    @property
    def pv_of_other(self) -> Wgmma:
        """The same with P of the other warpgroup, from shared memory."""
        return replace(self.pv, a=SmemOperand(self.p_tile, Major.K))

    def _kv(self, major: Major) -> SmemOperand:
        return SmemOperand(Tile(self.tile_n, self.head_dim), major, STAGES, self.stage_bytes)
