"""Compile-time configuration of the forward of head dims above 256; see `kernel`. Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....fwd.variant import ForwardVariant, OutStore
from ....pipeline.smem import Tile
from ...wgmma import K_PER_MMA, ROWS, Major, SmemOperand, Wgmma
from ..config import BARRIER_BYTES

CONSUMERS = 2
TILE_N = 64  # keys of a block
PANELS_OF_K = 1  # columns of K in a part of a block, in panels
STAGES_OF_MAXIMA = 2  # the peer may still read the maxima before
KEYS_OF_V = 16  # keys of V in a part of a block


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90WidestConfig(ForwardVariant):
    """The fields are the compile key. A work tile has 128 rows, and both CTAs of a pair have all of them.

    Raises:
        ValueError: the tiles do not fit in shared memory, or half of O does not fit in the registers.
    """

    ctas: ClassVar[int] = 2
    tma_ctas: ClassVar[int] = 1
    consumers: ClassVar[int] = CONSUMERS
    persistent: ClassVar[bool] = False
    has_packed_order: ClassVar[bool] = False
    seq_bounded_q: ClassVar[bool] = False
    out_store: ClassVar[OutStore] = OutStore.DIRECT

    def __post_init__(self) -> None:
        first, parts = self.first_parts_of_k, len(self.parts_of_k)
        least = max(first, parts - first + 1, self.parts_of_v + 1)  # a product's parts, and the first of the next one
        if self.half_columns > 256 or self.stages < least:
            raise ValueError(f"head_dim ({self.head_dim}, {self.head_dim_v}) exceeds registers or {self.smem_bytes}")

    @property
    def rows(self) -> int:
        return CONSUMERS * ROWS

    @property
    def seq_bounded_o(self) -> bool:
        return self.varlen

    @property
    def q_tile(self) -> Tile:
        """Q rows of one consumer."""
        return Tile(ROWS, self.head_dim, slots=self.q_slots)

    @property
    def q_step(self) -> int:
        return self.q_tile.nbytes

    @property
    def k_tile(self) -> Tile:
        """K block; a part of it has all rows of some panels."""
        return Tile(self.tile_n, self.head_dim, pieces=self.pieces)

    @property
    def v_tile(self) -> Tile:
        """Part of a V block: some rows. A CTA loads its panels only."""
        pieces = 1 if self.cache is None else self.cache.pieces(KEYS_OF_V)
        return Tile(KEYS_OF_V, self.head_dim_v, pieces=pieces)

    @property
    def p_tile(self) -> Tile:
        """P of one consumer and one key block."""
        return Tile(ROWS, self.tile_n)

    @property
    def half_panels(self) -> int:
        """Panels of V of a CTA. Of an odd number, the second CTA loads and multiplies the last one for nothing."""
        return -(-self.v_tile.panels // self.ctas)

    @property
    def half_columns(self) -> int:
        """Columns of O of a CTA."""
        return self.half_panels * self.v_tile.panel_columns

    @property
    def parts_of_k(self) -> tuple[range, ...]:
        """Panels of each part of a K block."""
        panels = self.k_tile.panels
        return tuple(range(i, min(i + PANELS_OF_K, panels)) for i in range(0, panels, PANELS_OF_K))

    @property
    def first_parts_of_k(self) -> int:
        """Parts of K whose product runs beside the softmax."""
        return -(-len(self.parts_of_k) // 2)

    @property
    def parts_of_v(self) -> int:
        """Parts of a V block."""
        return self.tile_n // KEYS_OF_V

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage, which holds a part of K or of V."""
        return max(PANELS_OF_K * self.k_tile.panel_bytes, self.half_panels * self.v_tile.panel_bytes)

    @property
    def stages(self) -> int:
        used = CONSUMERS * (self.q_tile.nbytes + 2 * self.p_tile.nbytes) + self.maxima_bytes + BARRIER_BYTES
        return (self.smem_bytes - used) // self.stage_bytes

    @property
    def maxima_bytes(self) -> int:
        """Bytes of the maxima of the peer's rows."""
        return STAGES_OF_MAXIMA * CONSUMERS * ROWS * 4

    @property
    def qk(self) -> Wgmma:
        """S = Q K^T, part by part."""
        q = SmemOperand(self.q_tile, Major.K, CONSUMERS, self.q_step)
        part = Tile(self.tile_n, PANELS_OF_K * self.k_tile.panel_columns)
        k = SmemOperand(part, Major.K, self.stages, self.stage_bytes)
        return Wgmma(self.dtype, n=self.tile_n, k=self.head_dim, b=k, a=q)

    @property
    def pv(self) -> Wgmma:
        """O += P V for the columns of a CTA, part by part."""
        p = SmemOperand(self.p_tile, Major.K, CONSUMERS, self.p_tile.nbytes)
        v = SmemOperand(Tile(KEYS_OF_V, self.half_columns), Major.MN, self.stages, self.stage_bytes)
        return Wgmma(self.dtype, n=self.half_columns, k=self.tile_n, b=v, a=p)

    def k_steps(self, part: int) -> range:
        """Groups of reduction elements of S in a part of K."""
        per_panel, panels = self.k_tile.panel_columns // K_PER_MMA, self.parts_of_k[part]
        return range(panels.start * per_panel, min(panels.stop * per_panel, self.qk.steps))

    def v_steps(self, part: int) -> range:
        """Groups of keys in a part of V."""
        count = KEYS_OF_V // K_PER_MMA
        return range(part * count, (part + 1) * count)
