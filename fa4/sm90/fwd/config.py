"""Compile-time configuration of the forward kernel, the shapes and operands that follow from it, and the context of the
roles."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ...fwd.consumers import ConsumerVariant
from ...fwd.variant import KvLoad, OutStore
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import Tile
from ..wgmma import K_PER_MMA, ROWS, Major, SmemOperand, Wgmma

BARRIER_BYTES = 512  # upper bound for all mbarriers, in the smem budget
REGISTERS = 65536  # of a multiprocessor
OPERAND_REGS = 30  # of a product, beside its accumulators; with fewer at CTA start, ptxas rejects the kernel


class Helpers(enum.Enum):
    """Warps that produce K and V in addition to the load warp."""

    NONE = "no warpgroup: TMA loads whole blocks"
    PIECES = "no warpgroup: TMA loads pieces of blocks"
    ONE = "a warpgroup that converts 8-bit numbers or copies rows"
    FETCHING = "a warpgroup that loads numbers of 8 or 4 bits into registers and converts them"
    BOTH = "a warpgroup that copies rows of 8-bit numbers, and one that converts them"


# Number of consumers -> registers per thread of (consumers, load warp, helpers). A single consumer keeps its start
# registers. A load warp of key pieces spills with 24 registers, the third consumer with 152. Without an entry the
# registers are too few.
_WHOLE = {1: (256, 256, 0), 2: (240, 24, 0), 3: (160, 32, 0), 4: (112, 24, 0)}
REGS = {
    Helpers.NONE: _WHOLE,
    Helpers.PIECES: _WHOLE | {2: (232, 40, 0)},
    Helpers.ONE: {1: (240, 40, 120), 2: (200, 40, 72)},
    Helpers.FETCHING: {1: (240, 40, 120), 2: (192, 24, 104)},
    Helpers.BOTH: {1: (216, 40, 120)},
}
OTHER_REGS = 32  # of a consumer thread, beside tiles
STAGES_OF_GATHERED = 3  # minimum for gathered rows; see the gather role


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90ForwardConfig(ConsumerVariant):
    """Compile-time configuration; the fields are the compile key.

    The number of packed heads divides 16 unless O is stored directly. consumers: warpgroups that compute; each has 64
    rows of the work tile. ctas: 1, or 2 CTAs that share a work tile; each has `consumers` * 64 rows and multicasts half
    of all K and V blocks. most_stages: upper bound of K stages and of V stages. kv8_stages: stages of 8-bit K and of
    8-bit V; 0 if these do not pass through shared memory or do not exist. ping_pong: consumers issue products in turn,
    so the softmax of one overlaps with the products of the others. With `one_block`, the blocks of all consumers are
    parts of the same rows in shared memory.

    Raises:
        ValueError: the tiles do not fit in shared memory; the warpgroups do not fit in the registers; a pair of CTAs
            cannot share key blocks; consumers cannot have one block.
    """

    kv8_stages: int
    ping_pong: bool
    ctas: int = 1

    def __post_init__(self) -> None:
        if self.consumers not in REGS[self.helpers] or self.head_dim_v // 2 + OPERAND_REGS > self.start_regs:
            raise ValueError(
                f"registers are too few for {self.consumers} warpgroups with O of {ROWS} x {self.head_dim_v} each, "
                f"beside {self.helpers.value}"
            )
        if self.stages < 1:
            raise ValueError(f"{self.rows} x {self.tile_n} tiles of head_dim {self.head_dim} exceed {self.smem_bytes}")
        if self.ctas > 1 and (self.lengths_vary or self.cache is not None or self.has_blocks):
            raise ValueError("a pair of CTAs shares blocks of keys that lie one after the other, the same for both")
        if self.has_counter and self.cache is not None:
            raise ValueError("kernels of caches take no tiles by a counter")
        if self.kv_load is KvLoad.GATHER and (self.kv8_stages or self.stages) < STAGES_OF_GATHERED:
            raise ValueError("the blocks that are waited for and copied take three stages, see the gather role")

        if self.one_block:
            self._check_one_block()

    def _check_one_block(self) -> None:
        is_dense = not self.lengths_vary and self.mods is None and self.cache is None
        if not (is_dense and self.has_left and self.has_right) or self.split or self.ctas > 1:
            raise ValueError(
                "one_block: expected windows in sequences of one length, without traced functions, caches, parts of "
                "keys and pairs of CTAs"
            )
        if self.keys_between_consumers % 8:
            raise ValueError(f"one_block: expected at most 8 packed heads, got {self.packed_heads}")

    def check_window(self, left: int | None, right: int | None) -> None:
        """Check that a block holds all keys that a consumer sees.

        Raises:
            ValueError: it does not.
        """
        if self.one_block and left is not None and right is not None:
            least = left + right + self.keys_between_consumers
            if least > self.tile_n:
                raise ValueError(f"one_block: tile_n {self.tile_n} is less than the {least} keys that a consumer sees")

    @property
    def tma_ctas(self) -> int:
        """1: each CTA of a pair counts the bytes of its own shared memory."""
        return 1

    def sharers(self, name: str) -> int:
        return self.ctas if name in ("k", "v") else 1

    @property
    def out_store(self) -> OutStore:
        """Direct for float32 O or a tile with few rows; over Q if two buffers would leave fewer than two stages."""
        if self.split or self.consumers == 1:
            return OutStore.DIRECT
        used = self.q_tile.nbytes + WARPS_PER_WARPGROUP * self.o_tile.nbytes
        return OutStore.TMA if self._stages(used) >= 2 else OutStore.TMA_OVER_Q

    @property
    def holds_q(self) -> bool:
        """True if a consumer keeps its rows of Q in registers, where enough of them are free. Otherwise the product
        reads Q from shared memory for every key block."""
        used = self.head_dim_v // 2 + self.tile_n // 2 + self.tile_n // 4 + self.head_dim // 4  # O, S, P, Q
        return self.consumers > 1 and self.mods is None and used + OTHER_REGS <= self.regs[0]

    @property
    def q_tile(self) -> Tile:
        """Q rows of one consumer."""
        return Tile(ROWS, self.head_dim, slots=self.q_slots)

    @property
    def keys_between_consumers(self) -> int:
        """Distance of the key blocks of neighbouring consumers: the queries of a consumer, or 0 if all have the same
        block."""
        return ROWS // self.rows_per_query if self.one_block else 0

    @property
    def loaded_keys(self) -> int:
        """Keys of a block in shared memory, or of the blocks of all consumers: whole steps of the second product."""
        if not self.one_block:
            return self.tile_n
        between = (self.consumers - 1) * self.keys_between_consumers
        return (-(-self.tile_n // K_PER_MMA) + -(-between // K_PER_MMA)) * K_PER_MMA

    @property
    def k_tile(self) -> Tile:
        """K block in the format of the load."""
        return Tile(self.loaded_keys, self.head_dim, self.kv_bits, pieces=self.pieces)

    @property
    def v_tile(self) -> Tile:
        return Tile(self.loaded_keys, self.head_dim_v, self.kv_bits, pieces=self.pieces)

    @property
    def k_operand(self) -> Tile:
        """K block in the format of the product."""
        return Tile(self.loaded_keys, self.head_dim)

    @property
    def v_operand(self) -> Tile:
        return Tile(self.loaded_keys, self.head_dim_v)

    @property
    def kv_load(self) -> KvLoad:
        """Rows of 8 or 4 bits that do not pass through shared memory are fetched."""
        is_fetched = self.converts_kv and not self.kv8_stages
        return KvLoad.FETCH if is_fetched else super(Sm90ForwardConfig, self).kv_load

    @property
    def helpers(self) -> Helpers:
        if self.kv_load is KvLoad.FETCH:
            return Helpers.FETCHING
        if self.kv_load is KvLoad.GATHER:
            return Helpers.BOTH if self.converts_kv else Helpers.ONE
        if self.converts_kv:
            return Helpers.ONE
        return Helpers.NONE if self.pieces == 1 else Helpers.PIECES

    @property
    def regs(self) -> tuple[int, int, int]:
        """Registers per thread of (consumers, load warp, convert or gather warpgroup)."""
        return REGS[self.helpers][self.consumers]

    @property
    def start_regs(self) -> int:
        """Registers per thread at CTA start: the same for all threads, allocated for whole warpgroups."""
        helpers = {Helpers.NONE: 0, Helpers.PIECES: 0, Helpers.BOTH: 2}.get(self.helpers, 1)
        threads = (self.consumers + helpers + 1) * WARPS_PER_WARPGROUP * 32
        return min(REGISTERS // threads // 8 * 8, 255)

    @property
    def o_bytes(self) -> int:
        """Bytes of the staged O of one consumer."""
        return 0 if self.out_store is OutStore.DIRECT else WARPS_PER_WARPGROUP * self.o_tile.nbytes

    @property
    def q_buffers(self) -> int:
        """2 if the Q of the next work tile has its own buffer and enough K/V stages remain; otherwise 1. A Q that moves
        to registers frees its buffer at once, so 1 is enough."""
        if self.holds_q:
            return 1
        least = STAGES_OF_GATHERED if self.kv_load is KvLoad.GATHER and not self.converts_kv else 2
        return 2 if self._stages(2 * self.q_tile.nbytes + self.o_bytes) >= least else 1

    @property
    def q_step(self) -> int:
        """Bytes between the Q tiles of consecutive consumers."""
        return max(self.q_tile.nbytes, self.o_bytes) if self.out_store is OutStore.TMA_OVER_Q else self.q_tile.nbytes

    @property
    def o_step(self) -> int:
        """Bytes between the staged O tiles of consecutive consumers."""
        return self.q_step if self.out_store is OutStore.TMA_OVER_Q else self.o_bytes

    @property
    def stages(self) -> int:
        """K stages; V has as many."""
        used = self.q_buffers * self.q_step + (0 if self.out_store is OutStore.TMA_OVER_Q else self.o_bytes)
        return min(self._stages(used), self.most_stages)

    def _stages(self, used: int) -> int:
        """Return the K/V stages that fit beside `used` bytes of Q and O per consumer."""
        used = self.consumers * used + self.kv8_stages * (self.k_tile.nbytes + self.v_tile.nbytes) + BARRIER_BYTES
        return (self.smem_bytes - used) // (self.k_operand.nbytes + self.v_operand.nbytes)

    @property
    def qk(self) -> Wgmma:
        """S = Q K^T."""
        q = None if self.holds_q else SmemOperand(self.q_tile, Major.K, self.q_buffers * self.consumers, self.q_step)
        k = SmemOperand(self.k_operand, Major.K, self.stages, self.k_operand.nbytes)
        return Wgmma(self.dtype, n=self.tile_n, k=self.head_dim, b=k, a=q)

    @property
    def half_n(self) -> int:
        """Keys in the first half of a block, rounded up to whole steps of the second product."""
        return -(-self.tile_n // (2 * K_PER_MMA)) * K_PER_MMA

    @property
    def pv(self) -> Wgmma:
        """O += P V, P from registers."""
        v = SmemOperand(self.v_operand, Major.MN, self.stages, self.v_operand.nbytes)
        return Wgmma(self.v_dtype, n=self.head_dim_v, k=self.tile_n, b=v)
