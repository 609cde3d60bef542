"""What the generated forward depends on, and the shapes and tables that follow from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import cutlass

from ..constant import Constant
from ..mma import Major, SmemOperand, Umma
from ..smem import Tile

TILE_M = 128  # rows of one Q tile: the lanes of tensor memory
Q_TILES = 2  # Q tiles of one CTA, in ping-pong
CTA_ROWS = Q_TILES * TILE_M
TILE_N = 128  # keys of one block
P_HEAD = 96  # keys whose P is handed to the matrix unit first; the rest follow
BARRIER_BYTES = 512  # upper bound of all mbarriers, for the smem budget


class Schedule(enum.Enum):
    """How CTAs get their work."""

    SINGLE = "one tile a CTA"
    PERSISTENT = "as many CTAs as fit, each strides through the tiles"


@dataclass(frozen=True, slots=True)
class Config(Constant):
    """Everything the generated code depends on; its fields are the compile key.

    group: query heads packed as neighbouring rows of a tile (divides 128), 1 for none. queries_per_kv: query heads of
    one key/value head. polynomial: pairs of every 16 whose exp2 runs on the FMA units. rescale_threshold: growth of
    a row's maximum, in powers of two, that O tolerates before it is rescaled; 0 rescales at every growth.
    """

    dtype: type[cutlass.Numeric]
    head_dim: int
    head_dim_v: int
    queries_per_kv: int
    group: int
    has_left: bool
    has_right: bool
    has_softcap: bool
    has_sink: bool
    varlen: bool
    has_seqused_q: bool
    has_seqused_k: bool
    schedule: Schedule
    polynomial: int
    rescale_threshold: float
    smem_bytes: int

    @property
    def q_tile(self) -> Tile:
        return Tile(TILE_M, self.head_dim)

    @property
    def k_tile(self) -> Tile:
        return Tile(TILE_N, self.head_dim)

    @property
    def v_tile(self) -> Tile:
        return Tile(TILE_N, self.head_dim_v)

    @property
    def o_tile(self) -> Tile:
        return Tile(TILE_M, self.head_dim_v)

    @property
    def kv_stage_bytes(self) -> int:
        return max(self.k_tile.nbytes, self.v_tile.nbytes)

    @property
    def rows_bytes(self) -> int:
        """One float for each row of both Q tiles."""
        return 4 * Q_TILES * TILE_M

    @property
    def o_over_q(self) -> bool:
        """O is staged in Q's place when separate places would leave fewer than two K/V stages."""
        return self._kv_stages(Q_TILES * (self.q_tile.nbytes + self.o_tile.nbytes)) < 2

    @property
    def o_step(self) -> int:
        """Bytes from one Q tile's staged O to the other's."""
        return self.q_tile.nbytes if self.o_over_q else self.o_tile.nbytes

    @property
    def kv_stages(self) -> int:
        held = Q_TILES * max(self.q_tile.nbytes, self.o_tile.nbytes)
        if not self.o_over_q:
            held = Q_TILES * (self.q_tile.nbytes + self.o_tile.nbytes)
        return min(self._kv_stages(held), 8)

    def _kv_stages(self, held: int) -> int:
        return (self.smem_bytes - held - 2 * self.rows_bytes - BARRIER_BYTES) // self.kv_stage_bytes

    @property
    def head_dim_v_padded(self) -> int:
        """Columns of the PV product: the matrix unit takes multiples of 16."""
        return -(-self.head_dim_v // 16) * 16

    @property
    def qk(self) -> Umma:
        """S = Q K^T."""
        k_major = SmemOperand(self.k_tile, Major.K)
        return Umma(self.dtype, n=TILE_N, k=self.head_dim, b=k_major, a=SmemOperand(self.q_tile, Major.K))

    @property
    def pv(self) -> Umma:
        """O += P V, P from tensor memory."""
        return Umma(self.dtype, n=self.head_dim_v_padded, k=TILE_N, b=SmemOperand(self.v_tile, Major.MN))

    @property
    def masked(self) -> bool:
        return self.has_left or self.has_right

    @property
    def scrubs_v(self) -> bool:
        """Rows after a sequence's end hold other data, so V's last block needs zeros there (0 * NaN is NaN)."""
        return self.varlen or self.has_seqused_k
