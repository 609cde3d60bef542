"""Compile-time configuration of the Blackwell forward of head dims above 256."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....fwd.variant import FetchingVariant, KvLoad, OutStore
from ....pipeline.smem import Tile
from ...stages import CTA_ROWS, PAIR, STAGE_BYTES, d_columns

S_STAGES = 2
RESERVED_BYTES = 3 << 10  # of shared memory: barriers, row maxima, alignment


@dataclass(frozen=True, slots=True, kw_only=True)
class WidestConfig(FetchingVariant):
    """The fields are the compile key. A work tile has 128 rows, 64 in each CTA of a pair. tile_n: 256 or 128."""

    ctas: ClassVar[int] = PAIR
    persistent: ClassVar[bool] = False
    sawtooth: ClassVar[bool] = False
    seq_bounded_q: ClassVar[bool] = False
    seq_bounded_o: ClassVar[bool] = False
    out_store: ClassVar[OutStore] = OutStore.DIRECT

    @property
    def rows(self) -> int:
        return PAIR * CTA_ROWS

    @property
    def keys(self) -> int:
        """Keys of a block whose K a CTA loads, and of whose scores a thread has one row."""
        return self.tile_n // PAIR

    @property
    def tma_ctas(self) -> int:
        return 1 if self.scales_q else PAIR  # TMA loads Q alone, for the CTA's own softmax

    @property
    def q_tile(self) -> Tile:
        return Tile(CTA_ROWS, self.head_dim, slots=self.q_slots)

    @property
    def k_tile(self) -> Tile:
        """Keys of a block that this CTA loads."""
        return Tile(self.keys, self.head_dim, pieces=self._pieces(self.keys))

    @property
    def v_tile(self) -> Tile:
        """Keys of a stage of V."""
        return Tile(CTA_ROWS, self.head_dim_v, pieces=self._pieces(CTA_ROWS))

    @property
    def kv_load(self) -> KvLoad:
        load = super(WidestConfig, self).kv_load
        return KvLoad.ROWS if load is KvLoad.GATHER else load

    def _pieces(self, keys: int) -> int:
        if self.kv_load is KvLoad.ROWS:
            return keys
        return 1 if self.cache is None or self.converts_kv else self.cache.pieces(keys)

    @property
    def p_tile(self) -> Tile:
        return Tile(CTA_ROWS, self.tile_n)

    @property
    def o_columns(self) -> int:
        """Tensor-memory columns of O."""
        return d_columns(self.head_dim_v)

    @property
    def kv_stages(self) -> int:
        """Stages of the ring that K and V share."""
        return (self.smem_bytes - RESERVED_BYTES - self.q_tile.nbytes - self.p_tile.nbytes) // STAGE_BYTES
