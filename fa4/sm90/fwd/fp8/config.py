"""Compile-time configuration of the e4m3 forward; see `kernel`. Context of the roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....fwd.variant import ForwardVariant, OutStore
from ....pipeline.roles import ROWS_PER_WARP, WARPS_PER_WARPGROUP
from ....pipeline.smem import Tile
from ...wgmma import ROWS, Major, SmemOperand, Wgmma
from ..config import BARRIER_BYTES

# Number of consumers -> registers per thread of (consumers, load warp).
REGS = {2: (240, 24), 3: (160, 32)}
OTHER_REGS = 48  # of a consumer thread, beside tiles: addresses and row statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config(ForwardVariant):
    """The fields are the compile key. A consumer has 64 rows of the work tile. V comes transposed, see
    `fwd.kernels.transpose`. consumers: warpgroups that compute, each with 64 rows of the work tile. line: words of P of
    every 16 of a row that come from `core.line.Line`.

    Raises:
        ValueError: the tiles do not fit in registers or shared memory.
    """

    consumers: int
    persistent: bool
    line: int
    ctas: ClassVar[int] = 1
    out_store: ClassVar[OutStore] = OutStore.TMA
    has_packed_order: ClassVar[bool] = False
    seq_bounded_q: ClassVar[bool] = False
    seq_bounded_k: ClassVar[bool] = False  # masked scores may be NaN; V has zeros there

    def __post_init__(self) -> None:
        used = self.half_n // 2 + self.half_n // 8 + self.head_dim_v // 2  # S, P, O
        if used + OTHER_REGS > self.regs[0] or self.stages < 2:
            raise ValueError(f"head_dim ({self.head_dim}, {self.head_dim_v}) exceeds registers or {self.smem_bytes}")

    @property
    def regs(self) -> tuple[int, int]:
        """Registers per thread of (consumers, load warp)."""
        return REGS[self.consumers]

    @property
    def rows(self) -> int:
        return self.consumers * ROWS

    @property
    def snake(self) -> bool:
        return self.persistent

    @property
    def seq_bounded_o(self) -> bool:
        return self.varlen

    @property
    def largest_p(self) -> int:
        return 7  # O is rescaled in registers

    @property
    def q_tile(self) -> Tile:
        """Q rows of one consumer."""
        return Tile(ROWS, self.head_dim, 8)

    @property
    def q_step(self) -> int:
        return self.q_tile.nbytes

    @property
    def q_buffers(self) -> int:
        return 1

    @property
    def k_tile(self) -> Tile:
        return Tile(self.tile_n, self.head_dim, 8)

    @property
    def v_tile(self) -> Tile:
        """V block, transposed."""
        return Tile(self.head_dim_v, self.tile_n, 8)

    @property
    def o_tile(self) -> Tile:
        """O rows of one warp, which it stores by itself."""
        return Tile(ROWS_PER_WARP, self.head_dim_v)

    @property
    def has_narrow_sums(self) -> bool:
        """Whether sums of O are bfloat16: those of float32 would leave no room for two stages."""
        return self.head_dim_v > 128

    @property
    def bytes_of_sums(self) -> int:
        """Bytes of the sums of O of one warp. They also hold its rows of O before they are stored."""
        return self.o_tile.nbytes * (1 if self.has_narrow_sums else 2)

    @property
    def stages(self) -> int:
        """K stages; V has as many."""
        sums = WARPS_PER_WARPGROUP * self.bytes_of_sums
        used = self.consumers * (self.q_buffers * self.q_step + sums) + BARRIER_BYTES
        return min((self.smem_bytes - used) // (self.k_tile.nbytes + self.v_tile.nbytes), 4)

    @property
    def half_n(self) -> int:
        """Keys of half a block."""
        return self.tile_n // 2

    @property
    def qk(self) -> Wgmma:
        """S = Q K^T of half a block."""
        q = SmemOperand(self.q_tile, Major.K, self.q_buffers * self.consumers, self.q_step)
        k = SmemOperand(self.k_tile, Major.K, self.stages, self.k_tile.nbytes)
        return Wgmma(self.operand_dtype, n=self.half_n, k=self.head_dim, b=k, a=q)

    @property
    def pv(self) -> Wgmma:
        """O += P V of half a block, P from registers."""
        v = SmemOperand(self.v_tile, Major.K, self.stages, self.v_tile.nbytes)
        return Wgmma(self.operand_dtype, n=self.head_dim_v, k=self.half_n, b=v)
