"""What the generated forward depends on, and the shapes and tables that follow from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import cutlass

from ...core.constant import Constant
from ...pipeline.smem import Tile
from ..mma import Major, SmemOperand, Umma

TILE_M = 128  # rows of one Q tile: the lanes of tensor memory
Q_TILES = 2  # Q tiles of one CTA, in ping-pong
CTA_ROWS = Q_TILES * TILE_M  # of a pair of CTAs twice as many
TILE_N = 128  # keys of one block
P_HEAD = 96  # keys whose P is handed to the matrix unit first; the rest follow
BARRIER_BYTES = 512  # upper bound of all mbarriers, for the smem budget


class Schedule(enum.Enum):
    """How CTAs get their work."""

    SINGLE = "one tile a CTA"
    PERSISTENT = "as many CTAs as fit, each strides through the tiles"
    DYNAMIC = "a CTA a tile, but those that run take over the tiles of those that have not started"


@dataclass(frozen=True, slots=True)
class Config(Constant):
    """Everything the generated code depends on; its fields are the compile key.

    group: query heads packed as neighbouring rows of a tile (divides 128), 1 for none. queries_per_kv: query heads of
    one key/value head. polynomial: pairs of every 16 whose exp2 runs on the FMA units. rescale_threshold: growth of
    a row's maximum, in powers of two, that O tolerates before it is rescaled; 0 rescales at every growth. sawtooth:
    every other work tile of a CTA takes its unmasked key blocks in ascending order, starting with those that the tile
    before it read last.

    ctas: 1, or 2 that work as a pair. A Q tile of a pair has 256 rows, 128 in each CTA's tensor memory, and every
    product is computed by both at once: K's rows and V's columns are split between their shared memories, so that each
    loads and holds half of every key block.

    Raises:
        ValueError: a pair is asked for what it does not do.
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
    sawtooth: bool
    ctas: int
    smem_bytes: int

    def __post_init__(self) -> None:
        if self.ctas == 2 and self.head_dim_v != 2 * self.v_tile.panel_columns:
            raise ValueError(f"a pair of CTAs takes head_dim_v = 128, not {self.head_dim_v}")
        if self.ctas == 2 and self.schedule is Schedule.DYNAMIC:
            raise ValueError("a pair of CTAs takes the single or the persistent schedule, not the dynamic one")

    @property
    def rows(self) -> int:
        """Rows of a work tile."""
        return self.ctas * CTA_ROWS

    @property
    def q_tile(self) -> Tile:
        return Tile(TILE_M, self.head_dim)

    @property
    def k_tile(self) -> Tile:
        """This CTA's keys of a block."""
        return Tile(TILE_N // self.ctas, self.head_dim)

    @property
    def v_tile(self) -> Tile:
        """This CTA's columns of a block."""
        return Tile(TILE_N, self.head_dim_v // self.ctas)

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
        q, k = SmemOperand(self.q_tile, Major.K), SmemOperand(self.k_tile, Major.K)
        return Umma(self.dtype, n=TILE_N, k=self.head_dim, b=k, a=q, m=self.ctas * TILE_M, ctas=self.ctas)

    @property
    def pv(self) -> Umma:
        """O += P V, P from tensor memory."""
        v, m = SmemOperand(self.v_tile, Major.MN), self.ctas * TILE_M
        return Umma(self.dtype, n=self.head_dim_v_padded, k=TILE_N, b=v, m=m, ctas=self.ctas)

    @property
    def masked(self) -> bool:
        return self.has_left or self.has_right

    @property
    def ragged_q(self) -> bool:
        """Rows after a sequence's queries are not the sequence's: TMA's maps must end with it; see `sequence.ragged`.
        Unused rows of its own are its own business: their output is zero, whatever they hold."""
        return self.varlen

    @property
    def ragged_k(self) -> bool:
        """Rows after a sequence's keys may hold anything, and 0 * NaN is NaN: TMA puts zeros there."""
        return self.varlen or self.has_seqused_k
