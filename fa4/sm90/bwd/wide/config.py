"""Configuration of the wide backward: one consumer computes dV of 64 keys, the other dK; see `kernel`. Context of the
roles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ....core.rows import Rows, clamp_tile
from ....pipeline.smem import Tile
from ....runtime.dsl import cutlass
from ...wgmma import ROWS, Major, SmemOperand, Wgmma
from ..common.config import BARRIER_BYTES, PANEL_COLUMNS, ByQueries, Sm90BackwardSteps

if TYPE_CHECKING:
    from cutlass import Int32

    from ....pipeline.tma import TmaTile

P_BYTES = 2  # of an element of P in shared memory
# Shared memory has 2^15 P as float16, at most 32768: all 11 significant bits from P = 2^-29 on, some from 2^-39 on. P
# itself would have all bits from 2^-14 on only, but a row of n keys has P of about 1 / n.
WEIGHT_EXPONENT = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90WideConfig(Sm90BackwardSteps):
    """A step has 64 queries; a consumer computes dQ of all of them, for its column panels."""

    ctas: int = 1
    cta_tile_n: ClassVar[int] = ROWS
    weight_exponent: ClassVar[int] = WEIGHT_EXPONENT

    def sharers(self, name: str) -> int:
        return self.ctas if name in ("q", "do") else 1

    def cta_share(self, tma: TmaTile, block: Int32, rank: Int32, rows: Rows) -> Int32:
        """Return the tile that a CTA loads: with multicast, a share of the rows. In a pair it may be empty."""
        if tma.multicast > 1:
            block = block * tma.multicast + rank
        return (
            clamp_tile(block, rows, tma.tile.rows // tma.multicast) if self.ctas == 2 and self.lengths_vary else block
        )

    @property
    def cluster_tile_n(self) -> int:
        return self.ctas * self.cta_tile_n

    @property
    def tma_ctas(self) -> int:
        """1: each CTA of a pair issues its own loads."""
        return 1

    @property
    def semaphores(self) -> int:
        """Counters per query block: one per CTA of a pair, which orders the additions of the CTA's columns."""
        return self.ctas if self.deterministic else 0

    @property
    def order_bytes(self) -> int:
        """Bytes of the order index of each stage of dS."""
        return 4 * self.ds_stages if self.deterministic else 0

    @property
    def cta_panels(self) -> int:
        """Column panels of dQ that a CTA computes. Of three, the second CTA of a pair computes the last one twice; the
        sum has room for both."""
        return -(-self.k_tile.panels // self.ctas)

    def panel(self, index: Int32 | int) -> Int32 | int:
        """Return the panel of K for a column panel of dQ."""
        if self.ctas * self.cta_panels == self.k_tile.panels:
            return index
        return cutlass.min(index, self.k_tile.panels - 1)

    @property
    def peer_k_bytes(self) -> int:
        """CTA pair: bytes of the peer CTA's keys in this CTA's dQ columns."""
        return self.cta_panels * self.k_tile.panel_bytes if self.ctas == 2 else 0

    @property
    def ds_tile(self) -> Tile:
        """dS, a row per query; one panel for each CTA's keys, the own keys first."""
        return Tile(ROWS, self.cluster_tile_n)

    @property
    def p_bytes(self) -> int:
        """Bytes of P of a step, in thread order."""
        return P_BYTES * ROWS * ROWS

    @property
    def smem_used(self) -> int:
        """Shared memory in use, in bytes."""
        used = self.k_tile.nbytes + self.peer_k_bytes + self.v_tile.nbytes
        used += self.ds_stages * (self.p_bytes + self.ds_tile.nbytes)
        q_bytes = self.q_tile.nbytes + self.rows_bytes
        return used + self.q_stages * q_bytes + self.stages * self.do_tile.nbytes + self.order_bytes + BARRIER_BYTES

    @property
    def placement(self) -> ByQueries:
        return ByQueries(ROWS, self.ctas * self.cta_panels * PANEL_COLUMNS)

    def dq_panels(self, consumer: int) -> range:
        """Return the panels, among the CTA's column panels of dQ, that a consumer computes."""
        first = -(-self.cta_panels // 2)
        return range(first) if consumer == 0 else range(first, self.cta_panels)

    def dq(self, consumer: int) -> Wgmma:
        """dQ = dS K for the keys of one CTA and the panels of a consumer."""
        k = SmemOperand(self.k_tile, Major.MN)
        ds = SmemOperand(self.ds_tile, Major.K, self.ds_stages, self.ds_tile.nbytes)
        return Wgmma(self.dtype, n=len(self.dq_panels(consumer)) * PANEL_COLUMNS, k=ROWS, b=k, a=ds)
