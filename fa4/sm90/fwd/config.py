"""What the generated forward depends on, and the shapes and tables that follow from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ...fwd.variant import Variant
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import Tile
from ..fragment import ROWS_PER_WARP
from ..wgmma import K_PER_MMA, ROWS, Major, SmemOperand, Wgmma

BARRIER_BYTES = 512  # upper bound of all mbarriers, for the smem budget
REGISTERS = 65536  # of a multiprocessor
OPERAND_REGS = 30  # of a product, beside its accumulators: ptxas refuses one for which a thread starts with fewer


class Helpers(enum.Enum):
    """Who brings K and V, beside one warp that loads."""

    NONE = "nobody: TMA brings whole blocks"
    PIECES = "nobody: TMA brings pieces of blocks"
    ONE = "a warpgroup that converts 8-bit numbers or copies rows"
    FETCHING = "a warpgroup that loads 8-bit numbers into registers and converts them"
    BOTH = "a warpgroup that copies rows of 8-bit numbers, and one that converts them"


# A thread's registers, of those that compute, of those that load and of those that help, by how many warpgroups
# compute; one alone has enough as it starts. With 24 a loader of pieces of keys spills; with 152 a third warpgroup that
# computes would. Where there is no row registers are too few.
_WHOLE = {1: (256, 256, 0), 2: (240, 24, 0), 3: (160, 32, 0), 4: (112, 24, 0)}
REGS = {
    Helpers.NONE: _WHOLE,
    Helpers.PIECES: _WHOLE | {2: (232, 40, 0)},
    Helpers.ONE: {1: (240, 40, 120), 2: (200, 40, 72)},
    Helpers.FETCHING: {1: (240, 40, 120), 2: (192, 24, 104)},
    Helpers.BOTH: {1: (216, 40, 120)},
}
OTHER_REGS = 32  # of a thread that computes, beside tiles
STAGES_OF_GATHERED = 3  # at least, of those that rows are gathered into; see that role


class Schedule(enum.Enum):
    """How CTAs get their work."""

    SINGLE = "one tile a CTA"
    PACKED = "one tile a CTA, for packed sequences only as many as their rows may need"
    PERSISTENT = "as many CTAs as fit, each goes through the tiles to and fro"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Variant):
    """Everything the generated code depends on; its fields are the compile key.

    packed heads divide 16 unless O is stored `directly`. teams: warpgroups that compute, each 64 rows of the work tile.
    ctas: 1, or 2 that share a work tile: each has `consumers` of its rows, and loads half of every block of K and of V into
    the shared memory of both.
    most_stages: of K, and of V, where there is room for more. byte_stages: of K, and of V, as 8-bit numbers; 0 where
    these do not come through shared memory, or are none. ping_pong: teams take turns on the matrix unit, so that one's
    softmax meets another's products.

    Raises:
        ValueError: the tiles do not fit the shared memory, or the warpgroups the registers, or a pair of CTAs has no
            keys to share.
    """

    consumers: int
    most_stages: int
    byte_stages: int
    schedule: Schedule
    ping_pong: bool
    ctas: int = 1

    def __post_init__(self) -> None:
        if self.consumers not in REGS[self.helpers] or self.head_dim_v // 2 + OPERAND_REGS > self.start_regs:
            raise ValueError(
                f"registers are too few for {self.consumers} warpgroups with O of {ROWS} x {self.head_dim_v} each, beside "
                f"{self.helpers.value}"
            )
        if self.stages < 1:
            raise ValueError(f"{self.rows} x {self.tile_n} tiles of head_dim {self.head_dim} exceed {self.smem_bytes}")
        if self.ctas > 1 and (self.lengths_vary or self.cache is not None or self.has_blocks):
            raise ValueError("a pair of CTAs shares blocks of keys that lie one after the other, the same for both")
        if self.gathers and (self.byte_stages or self.stages) < STAGES_OF_GATHERED:
            raise ValueError("the blocks that are waited for and copied take three stages, see the gather role")

    @property
    def rows(self) -> int:
        """Rows of a work tile."""
        return self.ctas * self.consumers * ROWS

    @property
    def tma_ctas(self) -> int:
        """Each CTA of a pair counts what it gets itself."""
        return 1

    def sharers(self, name: str) -> int:
        return self.ctas if name in ("k", "v") else 1

    @property
    def directly(self) -> bool:
        """O goes from registers to global memory: float32, or a few rows of a tile."""
        return self.split or self.consumers == 1

    @property
    def holds_q(self) -> bool:
        """Whether a team's rows of Q lie in registers, of which enough are left, and not in shared memory, for the
        product to read again in every key block."""
        held = self.head_dim_v // 2 + self.tile_n // 2 + self.tile_n // 4 + self.head_dim // 4  # O, S, P, Q
        return self.consumers > 1 and self.mods is None and held + OTHER_REGS <= self.regs[0]

    @property
    def q_tile(self) -> Tile:
        """One team's rows."""
        return Tile(ROWS, self.head_dim, slots=self.q_slots)

    @property
    def k_tile(self) -> Tile:
        """As it is loaded."""
        return Tile(self.tile_n, self.head_dim, self.bits_of_keys, pieces=self.pieces)

    @property
    def v_tile(self) -> Tile:
        return Tile(self.tile_n, self.head_dim_v, self.bits_of_keys, pieces=self.pieces)

    @property
    def k_operand(self) -> Tile:
        """As the product reads it."""
        return Tile(self.tile_n, self.head_dim)

    @property
    def v_operand(self) -> Tile:
        return Tile(self.tile_n, self.head_dim_v)

    @property
    def fetches(self) -> bool:
        """Whether those who convert 8-bit numbers load them themselves."""
        return self.plain_keys and self.has_bytes and not self.byte_stages

    @property
    def gathers(self) -> bool:
        """Whether a role copies rows into shared memory."""
        return self.plain_keys and not self.fetches

    @property
    def helpers(self) -> Helpers:
        if self.fetches:
            return Helpers.FETCHING
        if self.has_bytes or self.gathers:
            return Helpers.BOTH if self.has_bytes and self.gathers else Helpers.ONE
        return Helpers.NONE if self.pieces == 1 else Helpers.PIECES

    @property
    def regs(self) -> tuple[int, int, int]:
        """A thread's, of those that compute, of those that load and of those that convert or gather, if any."""
        return REGS[self.helpers][self.consumers]

    @property
    def start_regs(self) -> int:
        """A thread's registers as a CTA starts, which are the same for all; registers are given to whole warpgroups."""
        helpers = {Helpers.NONE: 0, Helpers.PIECES: 0, Helpers.BOTH: 2}.get(self.helpers, 1)
        threads = (self.consumers + helpers + 1) * WARPS_PER_WARPGROUP * 32
        return min(REGISTERS // threads // 8 * 8, 255)

    @property
    def o_tile(self) -> Tile:
        """One warp's rows, which it stores by itself."""
        return Tile(ROWS_PER_WARP, self.head_dim_v)

    @property
    def o_bytes(self) -> int:
        """One team's staged O."""
        return 0 if self.directly else WARPS_PER_WARPGROUP * self.o_tile.nbytes

    @property
    def q_buffers(self) -> int:
        """2 where the next work tile's Q has a place of its own beside as many K/V stages as are needed. A Q that goes
        to registers leaves its place at once."""
        if self.holds_q:
            return 1
        least = STAGES_OF_GATHERED if self.gathers and not self.has_bytes else 2
        return 2 if self._stages(2 * self.q_tile.nbytes + self.o_bytes) >= least else 1

    @property
    def o_over_q(self) -> bool:
        """O is staged in Q's place when separate places would leave fewer than two K/V stages."""
        return not self.directly and self._stages(self.q_tile.nbytes + self.o_bytes) < 2

    @property
    def q_step(self) -> int:
        """Bytes from one team's Q to the next one's."""
        return max(self.q_tile.nbytes, self.o_bytes) if self.o_over_q else self.q_tile.nbytes

    @property
    def o_step(self) -> int:
        """Bytes from one team's staged O to the next one's."""
        return self.q_step if self.o_over_q else self.o_bytes

    @property
    def stages(self) -> int:
        """Of K, and as many of V."""
        held = self.q_buffers * self.q_step + (0 if self.o_over_q else self.o_bytes)
        return min(self._stages(held), self.most_stages)

    def _stages(self, held: int) -> int:
        """With `held` bytes a team for Q and O."""
        held = self.consumers * held + self.byte_stages * (self.k_tile.nbytes + self.v_tile.nbytes) + BARRIER_BYTES
        return (self.smem_bytes - held) // (self.k_operand.nbytes + self.v_operand.nbytes)

    @property
    def qk(self) -> Wgmma:
        """S = Q K^T."""
        q = None if self.holds_q else SmemOperand(self.q_tile, Major.K, self.q_buffers * self.consumers, self.q_step)
        k = SmemOperand(self.k_operand, Major.K, self.stages, self.k_operand.nbytes)
        return Wgmma(self.dtype, n=self.tile_n, k=self.head_dim, b=k, a=q)

    @property
    def half_n(self) -> int:
        """Keys of a block's first half, in whole steps of the second product."""
        return -(-self.tile_n // (2 * K_PER_MMA)) * K_PER_MMA

    @property
    def pv(self) -> Wgmma:
        """O += P V, P from registers."""
        v = SmemOperand(self.v_operand, Major.MN, self.stages, self.v_operand.nbytes)
        return Wgmma(self.v_dtype, n=self.head_dim_v, k=self.tile_n, b=v)

    @property
    def persistent(self) -> bool:
        return self.schedule is Schedule.PERSISTENT

    @property
    def snake(self) -> bool:
        return self.persistent

    @property
    def counts_rows(self) -> bool:
        return self.schedule is Schedule.PACKED

    @property
    def seq_bounded_q(self) -> bool:
        """Rows after a sequence's queries may hold anything: nobody looks at what becomes of them."""
        return False

    @property
    def seq_bounded_o(self) -> bool:
        """Rows after a sequence's queries are not the sequence's, so that stores must end with it."""
        return self.varlen
