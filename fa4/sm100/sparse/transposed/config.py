"""Compile-time configuration of the transposed sparse backward: tiles, and the order of the products of a step."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ....pipeline.smem import Tile
from ...stages import CTA_ROWS, PANEL_COLUMNS
from ..config import STATISTICS_BYTES, ListsBackwardConfig

HEADS = CTA_ROWS  # of a tile: columns of scores
KEYS = 128  # of a step: rows of scores
HEADS_PANEL = Tile(HEADS, PANEL_COLUMNS)  # of Q or dO
BY_COLUMNS = Tile(KEYS, PANEL_COLUMNS)  # a stage of the ring: all keys of a step, columns to reduce, or the last of dQ
BY_KEYS = Tile(KEYS // 2, 2 * PANEL_COLUMNS)  # a stage of dQ: half of the keys, which are reduced, and 128 columns
DS_TILE = Tile(KEYS, HEADS)
INSTANCES = 2  # warpgroups that add columns of dV and dK to sums
SUM_COLUMNS = HEADS // INSTANCES  # of a product: half of a place in tensor memory, so that two are there at a time
WORD_COLUMNS = HEADS // 2  # of tensor memory that P or dS takes
RESERVED_BYTES = 1 << 10  # of shared memory beside the tiles: barriers, row statistics
MOST_STAGES = 8


class Place(enum.Enum):
    """Place in tensor memory of columns of dV or dK, which are added to sums: that of S or dP at other times."""

    S = "S"
    DP = "dP"


class Panel(NamedTuple):
    """64 columns of dV or dK. number: of the panel."""

    is_dv: bool
    number: int
    place: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm100TransposedConfig(ListsBackwardConfig):
    """Heads are columns of the products."""

    tile_n: ClassVar[int] = KEYS
    cta_keys: ClassVar[int] = KEYS
    half: ClassVar[int] = HEADS // 2  # heads of a thread in a step

    @property
    def ring_stages(self) -> int:
        used = self.q_tile.nbytes + self.do_tile.nbytes + DS_TILE.nbytes + STATISTICS_BYTES + RESERVED_BYTES
        return min((self.smem_bytes - used) // BY_COLUMNS.nbytes, MOST_STAGES)

    @property
    def dq_tiles(self) -> int:
        """Products of 128 columns of dQ; an odd panel more is one of 64 columns."""
        return self.q_tile.panels // 2

    @property
    def dq_columns(self) -> int:
        """Tensor-memory columns of dQ."""
        return -(-self.q_tile.panels // 2) * HEADS

    @property
    def sums(self) -> int:
        """Panels of dV and dK together."""
        return self.do_tile.panels + self.q_tile.panels

    @property
    def beside(self) -> tuple[int, int]:
        """Panels of dV and dK whose products are issued beside those of S, in the place of dP, and beside those of dP,
        in the place of S: as many as S and dP have of all panels that S, dP and dQ read."""
        s, dp = self.q_tile.panels, self.do_tile.panels
        end_of_s, end_of_dp = (self.sums * x // (s + dp + s) for x in (s, s + dp))
        return end_of_s, end_of_dp - end_of_s

    @property
    def panels(self) -> list[Panel]:
        """Panels of dV and dK in the order of their products in a step. Beside dQ both places are free; the last panel
        is in that of dP, since S is computed next."""
        beside_s, beside_dp = self.beside
        places = [Place.DP] * beside_s + [Place.S] * beside_dp
        for left in reversed(range(self.sums - len(places))):
            places.append(Place.S if left % 2 else Place.DP)
        nv = self.do_tile.panels
        return [Panel(i < nv, i if i < nv else i - nv, place) for i, place in enumerate(places)]
