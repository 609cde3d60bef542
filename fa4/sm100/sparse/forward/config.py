"""Compile-time configuration of the forward of lists of latents: tiles and stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....pipeline.smem import Tile
from ...stages import CTA_ROWS, PANEL_COLUMNS, STAGE_BYTES
from ...tensor_memory import COLUMNS
from ..config import ListsConfig

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
class Sm100ListsForwardConfig(ListsConfig):
    """Heads are rows of S, and columns of O."""

    tile_n: ClassVar[int] = KEYS
    cta_keys: ClassVar[int] = KEYS

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
