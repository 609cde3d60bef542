"""What the generated forward depends on, and the shapes and tables that follow from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ...fwd.variant import Variant
from ...pipeline.smem import Tile
from ..mma import Major, SmemOperand, Umma
from ..tmem import LANES

BARRIER_BYTES = 512  # upper bound of all mbarriers, for the smem budget

STAGES_OF_WIDENED = 3  # tiles that products read, of keys and values that come as 8-bit numbers


class Schedule(enum.Enum):
    """How CTAs get their work."""

    SINGLE = "one tile a CTA"
    PERSISTENT = "as many CTAs as fit, each strides through the tiles"
    DYNAMIC = "a CTA a tile, but those that run take over the tiles of those that have not started"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Variant):
    """Everything the generated code depends on; its fields are the compile key.

    packed heads divide 128 unless O is stored `directly`. polynomial: pairs of every 16 whose exp2 runs on the FMA
    units. sawtooth: every other work tile of a CTA takes its unmasked key blocks in ascending order, starting with
    those that the tile before it read last. q_tiles: Q tiles of one CTA, which take turns. directly: O goes from tensor
    memory through registers to global memory, where few rows of a tile are written, or they are float32, or shared
    memory is better spent on K and V. per_sm: CTAs that share a multiprocessor, so that the softmax of one meets the
    products of the other.

    ctas: 1, or 2 that work as a pair. A Q tile of a pair has 256 rows, 128 in each CTA's tensor memory, and every
    product is computed by both at once: K's rows and V's columns are split between their shared memories, so that each
    loads and holds half of every key block.

    Raises:
        ValueError: a pair is asked for what it does not do.
    """

    schedule: Schedule
    polynomial: int
    sawtooth: bool
    ctas: int
    q_tiles: int = 2
    tile_n: int = 128
    directly: bool = False
    per_sm: int = 1

    def __post_init__(self) -> None:
        if self.slots != self.packed and not self.directly:
            raise ValueError(f"{self.packed} packed heads do not divide {LANES}, and O is not stored directly")
        if (self.has_bytes or self.plain_keys) and not (self.directly and self.q_tiles == self.per_sm == 1):
            raise ValueError("of keys that warps convert or gather a CTA has one Q tile, which it stores directly")
        if self.plain_keys and (self.byte_stages or self.kv_stages) < 6:
            raise ValueError("the blocks that are waited for and copied take six stages, see the gather role")
        if self.split and not self.directly:
            raise ValueError("parts are float32, which is stored directly only")
        if self.ctas == 2 and self.head_dim_v != 2 * self.v_operand.panel_columns:
            raise ValueError(f"a pair of CTAs takes head_dim_v = 128, not {self.head_dim_v}")
        if self.ctas == 2 and self.schedule is Schedule.DYNAMIC:
            raise ValueError("a pair of CTAs takes the single or the persistent schedule, not the dynamic one")

    @property
    def tile_m(self) -> int:
        """Rows of one Q tile in one CTA: the lanes of tensor memory."""
        return LANES

    @property
    def p_head(self) -> int:
        """Keys whose P is handed to the matrix unit first; the rest follow."""
        return self.tile_n // 4 * 3

    @property
    def cta_rows(self) -> int:
        """Rows of all Q tiles of one CTA."""
        return self.q_tiles * self.tile_m

    @property
    def rows(self) -> int:
        """Rows of a work tile."""
        return self.ctas * self.cta_rows

    @property
    def q_tile(self) -> Tile:
        return self._tile(self.tile_m, self.head_dim, slots=self.q_slots)

    @property
    def k_tile(self) -> Tile:
        """This CTA's keys of a block, as they are loaded."""
        return Tile(self.tile_n // self.ctas, self.head_dim, self.bits_of_keys, pieces=self.pieces)

    @property
    def v_tile(self) -> Tile:
        """This CTA's columns of a block, as they are loaded."""
        return Tile(self.tile_n, self.head_dim_v // self.ctas, self.bits_of_keys, pieces=self.pieces)

    @property
    def k_operand(self) -> Tile:
        """As the product reads it."""
        return self._tile(self.tile_n // self.ctas, self.head_dim)

    @property
    def v_operand(self) -> Tile:
        return self._tile(self.tile_n, self.head_dim_v // self.ctas)

    @property
    def o_tile(self) -> Tile:
        return self._tile(self.tile_m, self.head_dim_v)

    def _tile(self, rows: int, columns: int, **how: int) -> Tile:
        return Tile(rows, columns, self.dtype.width, **how)

    @property
    def kv_stage_bytes(self) -> int:
        """Of a tile that a product reads."""
        return max(self.k_operand.nbytes, self.v_operand.nbytes)

    @property
    def byte_stage_bytes(self) -> int:
        """Of a tile of 8-bit numbers."""
        return max(self.k_tile.nbytes, self.v_tile.nbytes)

    @property
    def byte_stages(self) -> int:
        """Of the ring of 8-bit numbers: all the memory that the one that products read leaves."""
        if not self.has_bytes:
            return 0
        held = self.q_tiles * self.q_tile.nbytes + self.kv_stages * self.kv_stage_bytes
        return min(self._left(held) // self.byte_stage_bytes, 16)

    @property
    def rows_bytes(self) -> int:
        """One float for each row of both Q tiles."""
        return 4 * self.cta_rows

    @property
    def o_over_q(self) -> bool:
        """O is staged in Q's place when separate places would leave fewer than two K/V stages."""
        return not self.directly and self._kv_stages(self.q_tiles * (self.q_tile.nbytes + self.o_tile.nbytes)) < 2

    @property
    def o_step(self) -> int:
        """Bytes from one Q tile's staged O to the other's."""
        return self.q_tile.nbytes if self.o_over_q else self.o_tile.nbytes

    @property
    def kv_stages(self) -> int:
        """Of the ring that K and V share."""
        if self.has_bytes:
            return STAGES_OF_WIDENED
        if self.directly:
            return min(self._kv_stages(self.q_tiles * self.q_tile.nbytes), 16)
        held = self.q_tiles * max(self.q_tile.nbytes, self.o_tile.nbytes)
        if not self.o_over_q:
            held = self.q_tiles * (self.q_tile.nbytes + self.o_tile.nbytes)
        return min(self._kv_stages(held), 8)

    def _kv_stages(self, held: int) -> int:
        return self._left(held) // self.kv_stage_bytes

    def _left(self, held: int) -> int:
        return self.smem_bytes - held - 2 * self.rows_bytes - BARRIER_BYTES

    def elements(self, nbytes: int) -> int:
        """How many elements of q, k, v or out they are."""
        return 8 * nbytes // self.dtype.width

    @property
    def o_columns(self) -> int:
        """Columns of tensor memory that O of one Q tile takes."""
        return self.ctas * self.v_operand.panels * self.v_operand.panel_columns

    @property
    def head_dim_v_padded(self) -> int:
        """Columns of the PV product: the matrix unit takes multiples of 16."""
        return -(-self.head_dim_v // 16) * 16

    @property
    def qk(self) -> Umma:
        """S = Q K^T."""
        q, k = SmemOperand(self.q_tile, Major.K), SmemOperand(self.k_operand, Major.K)
        return Umma(self.dtype, n=self.tile_n, k=self.head_dim, b=k, a=q, m=self.ctas * self.tile_m, ctas=self.ctas)

    @property
    def pv(self) -> Umma:
        """O += P V, P from tensor memory."""
        v, m = SmemOperand(self.v_operand, Major.MN), self.ctas * self.tile_m
        return Umma(self.v_dtype, n=self.head_dim_v_padded, k=self.tile_n, b=v, m=m, ctas=self.ctas)

    @property
    def persistent(self) -> bool:
        return self.schedule is Schedule.PERSISTENT

    @property
    def counts_rows(self) -> bool:
        return self.varlen

    @property
    def seq_bounded_q(self) -> bool:
        """Rows after a sequence's queries are not the sequence's: TMA's maps must end with it; see `sequence.seq_bounded_tma`.
        Unused rows of its own are its own business: their output is zero, whatever they hold."""
        return self.varlen

    @property
    def seq_bounded_o(self) -> bool:
        return self.seq_bounded_q
