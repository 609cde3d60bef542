"""Compile-time configuration of the forward kernel, the shapes that follow from it, and the context of the roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...fwd.consumers import ROWS, ConsumerVariant
from ...fwd.variant import LARGEST_P_4BIT, OutStore
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES, Tile
from ...runtime.spec import MX_BLOCK
from ..product import OF_E2M1, OF_E4M3, Product

BARRIER_BYTES = 512  # upper bound for all mbarriers, in the smem budget
# Number of consumers -> registers per thread of (consumers, load warp). A single consumer keeps its start registers.
REGS = {1: (256, 256), 2: (240, 24), 3: (160, 32)}
OTHER_REGS = 48  # of a consumer thread, beside tiles
E2M1_COLUMNS = 32  # of V, or keys of K, of whose scales the lanes of a quad have a word each


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm120ForwardConfig(ConsumerVariant):
    """Compile-time configuration; the fields are the compile key.

    Raises:
        ValueError: the tiles do not fit in shared memory or registers.
    """

    ctas: ClassVar[int] = 1
    holds_q: ClassVar[bool] = True
    ping_pong: ClassVar[bool] = False  # predicted 2 to 5 % slower

    def __post_init__(self) -> None:
        if self.used_regs > self.regs[0]:
            raise ValueError(f"{self.used_regs} registers of tiles are too many for {self.consumers} consumers")
        if self.stages < 1:
            raise ValueError(f"{self.rows} x {self.tile_n} tiles of head_dim {self.head_dim} exceed {self.smem_bytes}")

    @property
    def regs(self) -> tuple[int, int]:
        """Registers per thread of (consumers, load warp)."""
        return REGS[self.consumers]

    @property
    def product(self) -> Product:
        return OF_E2M1 if self.multiplies_e2m1 else OF_E4M3

    @property
    def q_regs(self) -> int:
        """Registers of Q of a thread."""
        return 4 * self.product.steps(self.head_dim)

    @property
    def p_regs(self) -> int:
        """Registers of P of a thread."""
        return 4 * self.product.steps(self.tile_n)

    @property
    def half_n(self) -> int:
        """Keys in the first half of a block."""
        return self.tile_n // 2

    @property
    def used_regs(self) -> int:
        """Registers of O, S, P and Q of a thread, and others."""
        return self.head_dim_v // 2 + self.tile_n // 2 + self.p_regs + self.q_regs + OTHER_REGS

    @property
    def q_tile(self) -> Tile:
        """Q rows of one consumer."""
        return Tile(ROWS, self.head_dim // self.product.per_byte, 8, slots=self.q_slots)

    @property
    def k_tile(self) -> Tile:
        return self._key_tile(self.tile_n, self.head_dim // self.product.per_byte)

    @property
    def v_tile(self) -> Tile:
        return self._key_tile(self.tile_n // self.product.per_byte, self.head_dim_v)

    def _key_tile(self, rows: int, columns: int) -> Tile:
        """Tile of bytes without room for columns that do not exist, up to the next swizzle."""
        return Tile(rows, columns, 8, row_bytes=min(max(32, 1 << (columns - 1).bit_length()), PANEL_ROW_BYTES))

    @property
    def out_store(self) -> OutStore:
        """Direct for float32 O and a single consumer; else over Q, which is in registers."""
        return OutStore.DIRECT if self.split or self.consumers == 1 else OutStore.TMA_OVER_Q

    @property
    def o_bytes(self) -> int:
        """Bytes of the staged O of one consumer."""
        return 0 if self.out_store is OutStore.DIRECT else WARPS_PER_WARPGROUP * self.o_tile.nbytes

    @property
    def q_step(self) -> int:
        """Bytes between the Q tiles, and the staged O, of consecutive consumers."""
        return max(self.q_tile.nbytes, self.o_bytes)

    @property
    def seq_bounded_k(self) -> bool:
        """False with e2m1, which has no NaN."""
        return not self.multiplies_e2m1 and super(Sm120ForwardConfig, self).seq_bounded_k

    @property
    def stages(self) -> int:
        """K stages; V has as many."""
        free = self.smem_bytes - self.consumers * self.q_step - BARRIER_BYTES
        return min(free // (self.k_tile.nbytes + self.v_tile.nbytes + sum(self.scale_bytes)), self.most_stages)

    @property
    def scale_words(self) -> int:
        """Words of the scales of K, and of V, of a key block that a thread holds, with scales of 32 numbers."""
        return self.tile_n // MX_BLOCK

    @property
    def scale_bytes(self) -> tuple[int, int]:
        """Bytes of the scales of a key block of K, and of V, in shared memory: those of e2m1, in words of four."""
        if not self.multiplies_e2m1:
            return 0, 0
        of_key, steps = self.product.steps(self.head_dim), self.product.steps(self.tile_n)
        return 4 * of_key * self.tile_n, 4 * steps * E2M1_COLUMNS * -(-self.head_dim_v // E2M1_COLUMNS)

    @property
    def largest_p(self) -> float:
        return LARGEST_P_4BIT if self.multiplies_e2m1 else 8

    @property
    def rounds_largest_p(self) -> bool:
        """False for P in e2m1: it is 6 times the scale 448."""
        return not self.multiplies_e2m1
