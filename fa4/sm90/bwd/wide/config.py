"""Shapes of the wide backward: one warpgroup has dV of 64 keys, the other dK; see `kernel`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ....bwd.blocks import RowBlocks
from ....pipeline.smem import Tile
from ...wgmma import ROWS, Major, SmemOperand, Wgmma
from ..config import BARRIER_BYTES, PANEL_COLUMNS, ByThread, Steps
from ..placement import ByQueries

P_BYTES = 2  # of an element of P as it is handed over
# What is handed over is 2^15 P, at most 32768 as float16: it has all 11 bits from P = 2^-29 on, and some from 2^-39. P
# itself would have them from 2^-14 on, and a row of n keys has weights of 1 / n.
WEIGHT_EXPONENT = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class WideConfig(Steps):
    """A step has 64 queries, so that a warpgroup computes dQ of all of them, for its panels of columns."""

    ctas: int = 1
    multicast: int = 1
    cta_tile_n: ClassVar[int] = ROWS

    def sharers(self, name: str) -> int:
        return self.multicast if name in ("q", "do") else 1

    @property
    def cluster_tile_n(self) -> int:
        return self.ctas * self.cta_tile_n

    @property
    def tma_ctas(self) -> int:
        """Each CTA of a pair loads for itself."""
        return 1

    @property
    def semaphores(self) -> int:
        """Counters of a block of queries, each of which orders the additions of a CTA's columns."""
        return self.ctas if self.deterministic else 0

    @property
    def order_bytes(self) -> int:
        """A number for each step whose dQ may be added."""
        return 4 * self.ds_stages if self.deterministic else 0

    @property
    def cta_panels(self) -> int:
        """Panels of columns of dQ that a CTA computes."""
        return self.k_tile.panels // self.ctas

    @property
    def others_k_bytes(self) -> int:
        """Of a pair, the other CTA's keys in this one's columns of dQ."""
        return self.cta_panels * self.k_tile.panel_bytes if self.ctas == 2 else 0

    @property
    def ds_tile(self) -> Tile:
        """dS, a row per query: a panel for each CTA's keys, one's own first."""
        return Tile(ROWS, self.cluster_tile_n)

    @property
    def p_bytes(self) -> int:
        """P of a step, as the threads of a warpgroup hold it."""
        return P_BYTES * ROWS * ROWS

    @property
    def held_bytes(self) -> int:
        """Shared memory in use."""
        held = self.k_tile.nbytes + self.others_k_bytes + self.v_tile.nbytes
        held += self.ds_stages * (self.p_bytes + self.ds_tile.nbytes)
        of_q = self.q_tile.nbytes + self.rows_bytes
        return held + self.q_stages * of_q + self.stages * self.do_tile.nbytes + self.order_bytes + BARRIER_BYTES

    @property
    def row_blocks(self) -> RowBlocks:
        """What the kernels around the main one depend on."""
        placement = ByQueries(ROWS, self.k_tile.panels * PANEL_COLUMNS)
        return ByThread(
            self.dtype, self.head_dim, self.head_dim_v, self.tile_m, placement, self.varlen, self.has_sink,
            self.has_dlse, semaphores=self.semaphores, first_stores=self.semaphores > 0, pdl=True, weight_exponent=WEIGHT_EXPONENT,
            chained=self.chained,
        )  # fmt: skip

    @property
    def statistics_ahead(self) -> bool:
        return False

    def dq_panels(self, consumer: int) -> range:
        """Of the CTA's panels of columns of dQ, those that a warpgroup computes."""
        first = -(-self.cta_panels // 2)
        return range(first) if consumer == 0 else range(first, self.cta_panels)

    def dq(self, consumer: int) -> Wgmma:
        """dQ = dS K of one CTA's keys, a warpgroup's panels of columns."""
        k = SmemOperand(self.k_tile, Major.MN)
        ds = SmemOperand(self.ds_tile, Major.K, self.ds_stages, self.ds_tile.nbytes)
        return Wgmma(self.dtype, n=len(self.dq_panels(consumer)) * PANEL_COLUMNS, k=ROWS, b=k, a=ds)
