"""Compile-time configuration of the forward kernel, the shapes that follow from it, and the context of the roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...fwd.consumers import ConsumerVariant
from ...fwd.device.consumer import ROWS
from ...fwd.launch import ForwardContext
from ...fwd.variant import OutStore
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import Tile
from ...runtime.spec import MX_BLOCK
from ..mma import steps

BARRIER_BYTES = 512  # upper bound for all mbarriers, in the smem budget
# Number of consumers -> registers per thread of (consumers, load warp). A single consumer keeps its start registers.
REGS = {1: (256, 256), 2: (240, 24), 3: (160, 32)}
OTHER_REGS = 48  # of a consumer thread, beside tiles


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
    def q_regs(self) -> int:
        """Registers of Q of a thread."""
        return 4 * steps(self.head_dim)

    @property
    def p_regs(self) -> int:
        """Registers of P of a thread."""
        return 4 * steps(self.tile_n)

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
        return Tile(ROWS, self.head_dim, 8, slots=self.q_slots)

    @property
    def k_tile(self) -> Tile:
        return Tile(self.tile_n, self.head_dim, 8)

    @property
    def v_tile(self) -> Tile:
        return Tile(self.tile_n, self.head_dim_v, 8)

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
    def stages(self) -> int:
        """K stages; V has as many."""
        free = self.smem_bytes - self.consumers * self.q_step - BARRIER_BYTES
        return min(free // (self.k_tile.nbytes + self.v_tile.nbytes), self.most_stages)

    @property
    def scale_words(self) -> int:
        """Words of the scales of K, and of V, of a key block that a thread holds."""
        return self.tile_n // MX_BLOCK

    @property
    def largest_p(self) -> int:
        return 8


@dataclass(frozen=True, slots=True)
class Sm120ForwardContext(ForwardContext):
    """Arguments of a role's body."""

    cfg: Sm120ForwardConfig
