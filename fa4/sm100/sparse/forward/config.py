"""Compile-time configuration of the forward of lists of latents: tiles and stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....bwd.lists_plan import SparseBackwardOptions
from ....pipeline.smem import Tile
from ...stages import CTA_ROWS, PANEL_COLUMNS, STAGE_BYTES
from ...tensor_memory import COLUMNS

LATENT_COLUMNS = 512, 576  # of keys; values have the first 512
HEADS = CTA_ROWS  # of a tile: rows of scores
KEYS = 64  # of a block
KEYS_PANEL = Tile(KEYS, PANEL_COLUMNS)
BY_KEYS = Tile(KEYS, 2 * PANEL_COLUMNS)  # a stage of the ring
P_TILE = Tile(HEADS, KEYS)
O_ROWS = BY_KEYS.columns  # columns of O in a product, which are its rows
WORD_COLUMNS = PANEL_COLUMNS // 2  # of tensor memory that a panel of Q takes
RESERVED_BYTES = 2 << 10  # of shared memory: barriers, factors of rows
RESCALE_THRESHOLD = 8.0  # log2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm100ListsForwardConfig(SparseBackwardOptions):
    """A CTA has up to 64 query heads of a list. The fields are the compile key."""

    smem_bytes: int
    ctas: ClassVar[int] = 1
    has_front: ClassVar[bool] = False
    tile_m: ClassVar[int] = HEADS
    tile_n: ClassVar[int] = KEYS

    @property
    def q_tile(self) -> Tile:
        return Tile(HEADS, self.head_dim)

    @property
    def k_tile(self) -> Tile:
        """Rows that are loaded one by one."""
        return Tile(KEYS, self.head_dim, pieces=KEYS)

    @property
    def o_tiles(self) -> int:
        return self.head_dim_v // O_ROWS

    @property
    def q_panels_in_tmem(self) -> int:
        """Panels of Q for which tensor memory has room beside S and O."""
        room = COLUMNS - KEYS - self.o_tiles * HEADS
        return min(room // WORD_COLUMNS, self.q_tile.panels)

    @property
    def q_panels_in_smem(self) -> int:
        return self.q_tile.panels - self.q_panels_in_tmem

    @property
    def stages_of_block(self) -> int:
        return -(-self.q_tile.panels // 2)

    @property
    def ring_stages(self) -> int:
        used = self.q_panels_in_smem * KEYS_PANEL.nbytes + P_TILE.nbytes + RESERVED_BYTES
        return (self.smem_bytes - used) // STAGE_BYTES
