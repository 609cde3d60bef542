"""Compile-time configuration of the sparse backward: tiles and products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...bwd.lists_plan import ListsVariant
from ...pipeline.smem import Tile
from ..wgmma import ROWS, Major, SmemOperand, Wgmma

TILE_N = 64  # listed keys of a step
STAGES = 2  # blocks of K and V in shared memory
WARPGROUP = 128  # threads
GATHERERS = 2  # warps
BARRIER_BYTES = 256  # upper bound for all mbarriers
SUM_PADDING = 16  # bytes after a row of dK or dV in shared memory, against bank conflicts


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseBackwardConfig(ListsVariant):
    """A CTA has `tile_m` query heads of a list's key/value head, all of them if they are 128 or fewer. The fields are
    the compile key.

    has_front: CTAs start where others are in the keys (`front`), and the rows of the next sums are prefetched, for sums
    that are larger than the L2 cache.

    Raises:
        ValueError: the tiles do not fit in shared memory; the order of deterministic sums would vary.
    """

    smem_bytes: int
    has_front: bool
    ctas: ClassVar[int] = 1
    tile_n: ClassVar[int] = TILE_N

    def __post_init__(self) -> None:
        if self.has_front and self.deterministic:
            raise ValueError(
                "CTAs that start where others are add up dQ in varying orders, which are not deterministic"
            )
        if self.smem_used > self.smem_bytes:
            raise ValueError(f"{self.tile_m} x {TILE_N} tiles hold {self.smem_used} bytes, there are {self.smem_bytes}")

    @property
    def tile_m(self) -> int:
        return ROWS if self.group <= ROWS else 2 * ROWS

    @property
    def scorers(self) -> tuple[str, ...]:
        """Roles that compute P and dS of 64 rows each."""
        return ("dV", "dK")[: self.tile_m // ROWS]

    def has_scores(self, role: str) -> bool:
        return role in self.scorers

    def has_dq(self, role: str) -> bool:
        return role == "dK" or self.tile_m > ROWS

    @property
    def ds_readers(self) -> tuple[str, ...]:
        return tuple(role for role in ("dV", "dK") if self.has_dq(role))

    @property
    def q_tile(self) -> Tile:
        return Tile(self.tile_m, self.head_dim)

    @property
    def do_tile(self) -> Tile:
        return Tile(self.tile_m, self.head_dim_v)

    @property
    def k_tile(self) -> Tile:
        return Tile(TILE_N, self.head_dim)

    @property
    def v_tile(self) -> Tile:
        return Tile(TILE_N, self.head_dim_v)

    @property
    def p_tile(self) -> Tile:
        """P or dS of a step, a row per query head."""
        return Tile(self.tile_m, TILE_N)

    def sum_row_bytes(self, columns: int) -> int:
        """Return the bytes from a row of dK or dV in shared memory to the next one."""
        return 4 * columns + SUM_PADDING

    @property
    def smem_used(self) -> int:
        """Bytes of shared memory of a CTA."""
        used = self.q_tile.nbytes + self.do_tile.nbytes + STAGES * (self.k_tile.nbytes + self.v_tile.nbytes)
        sums = sum(TILE_N * self.sum_row_bytes(columns) for columns in (self.head_dim, self.head_dim_v))
        return used + 2 * self.p_tile.nbytes + sums + BARRIER_BYTES

    @property
    def scores(self) -> Wgmma:
        """S = Q K^T of 64 rows."""
        k = SmemOperand(self.k_tile, Major.K, STAGES, self.k_tile.nbytes)
        return Wgmma(self.dtype, n=TILE_N, k=self.head_dim, b=k, a=SmemOperand(self.q_tile, Major.K))

    @property
    def dp(self) -> Wgmma:
        """dP = dO V^T of 64 rows."""
        v = SmemOperand(self.v_tile, Major.K, STAGES, self.v_tile.nbytes)
        return Wgmma(self.dtype, n=TILE_N, k=self.head_dim_v, b=v, a=SmemOperand(self.do_tile, Major.K))

    @property
    def dq(self) -> Wgmma:
        """dQ += dS K of 64 rows."""
        k = SmemOperand(self.k_tile, Major.MN, STAGES, self.k_tile.nbytes)
        return Wgmma(self.dtype, n=self.head_dim, k=TILE_N, b=k, a=SmemOperand(self.p_tile, Major.K))

    @property
    def dv(self) -> Wgmma:
        """dV = P^T dO of a block of keys."""
        return self._of_keys(self.do_tile)

    @property
    def dk(self) -> Wgmma:
        """dK = dS^T Q of a block of keys."""
        return self._of_keys(self.q_tile)

    def _of_keys(self, b: Tile) -> Wgmma:
        a = SmemOperand(self.p_tile, Major.MN)
        return Wgmma(self.dtype, n=b.columns, k=self.tile_m, b=SmemOperand(b, Major.MN), a=a)
