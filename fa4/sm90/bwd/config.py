"""Compile-time configuration of the usual backward kernel, the shapes and operands that follow from it, and the context
of the roles.

A consumer has 64 of a CTA's 128 keys. Only dS passes through shared memory, for dQ = dS K, which sums over the keys of
both consumers. See `common.config` for the products on transposed scores.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ...bwd.blocks import Placement
from ...pipeline.smem import Tile
from ...runtime.dsl import cutlass
from ..wgmma import ROWS, Major, SmemOperand, Wgmma
from .common.config import BARRIER_BYTES, CONSUMERS, PANEL_COLUMNS, ByQueries, Sm90BackwardSteps, fragment_offset
from .common.launch_order import LaunchOrder

if TYPE_CHECKING:
    from cutlass import Int32

TILE_N = CONSUMERS * ROWS  # keys per CTA
REDUCERS = 3  # maximum number of warps that add dQ to its sum


@dataclass(frozen=True, slots=True)
class ByColumns(Placement):
    """Layout of dQ^T: a consumer has panels of 64 columns as rows, and the queries of the block as columns. An odd
    panel is last in each consumer's share, with half of the queries."""

    rows: ClassVar[int] = 2

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        panel, of_panel, each = first // ROWS, ROWS * self.tile_m, self.columns // ROWS // CONSUMERS
        if panel < CONSUMERS * each:
            consumer, at = panel // each, panel % each
        else:
            half = self.tile_m // CONSUMERS
            consumer, at, row = row // half, each, row % half
        return consumer * (self.elements // CONSUMERS) + at * of_panel + fragment_offset(within, row)


class Division(enum.Enum):
    """Division of the dQ of a step between two consumers."""

    QUERIES = "dQ = dS K of 64 queries each"
    COLUMNS = "dQ^T = K^T dS^T of as many panels of columns each, an odd one by halves of its queries"
    NONE = "dQ = dS K by the first of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90BackwardConfig(Sm90BackwardSteps):
    """Two consumers with 64 keys each, which divide the dQ of a step."""

    ctas: ClassVar[int] = 1
    cta_tile_n: ClassVar[int] = TILE_N
    cluster_tile_n: ClassVar[int] = TILE_N

    def l2_group(self, n_blocks: Int32, seqlen_q: Int32, pairs: Int32) -> Int32:
        """Return the group size. Without an order, without a mask and without a GQA group it is 1: the CTAs of a pair
        run at a time and find its queries in L2. Causal or with block lists, see `l2_group_that_fills`."""
        if self.has_right or self.has_blocks:
            return self.l2_group_that_fills(n_blocks, pairs)
        if self.staggered or (self.group == 1 and not self.ascending_order):
            return cutlass.Int32(1)
        return LaunchOrder.l2_group(self, n_blocks, seqlen_q, pairs)

    @property
    def trims(self) -> bool:
        """True if the first queries that see a CTA's keys may see none of the second consumer's keys."""
        return self.has_right and not self.has_blocks and self.tile_m == ROWS

    @property
    def halves_steps(self) -> bool:
        """True if a consumer computes only half of the queries of a step where only these see its keys, as along both
        bounds of a window."""
        is_window = self.has_left and self.has_right and self.mods is None
        return is_window and self.tile_m == CONSUMERS * ROWS and self.q_tile.panels == self.do_tile.panels == 1

    @property
    def half(self) -> Sm90BackwardConfig:
        """Configuration of half a step. The stages of Q and dO are rings of tiles with half of the rows, which are
        contiguous in a tile of one panel."""
        stages = {name: CONSUMERS * getattr(self, name) for name in ("q_stages", "stages")}
        return replace(self, tile_m=ROWS, last_finishes=False, **stages)

    @property
    def overlaps_last_dq(self) -> bool:
        """True if dV and dK leave the registers during the last dQ product. With tile_m = 80 this spills registers."""
        return self.tile_m != 80

    @property
    def stages_fit_dk(self) -> bool:
        """True if the stages of Q and dO can hold a consumer's dK."""
        return self.overlaps_last_dq and min(self.q_tile.nbytes, self.do_tile.nbytes) >= self.dk_tile.nbytes

    @property
    def ds_tile(self) -> Tile:
        """dS, a row per query; the keys of a consumer fill a panel."""
        return Tile(self.tile_m, TILE_N)

    @property
    def division(self) -> Division:
        """Division of dQ. COLUMNS works with any number of queries, but half of the second panel may be padding."""
        if self.tile_m == CONSUMERS * ROWS:
            return Division.QUERIES
        is_padded = PANEL_COLUMNS < self.columns < CONSUMERS * PANEL_COLUMNS
        return Division.NONE if is_padded and self.tile_m == ROWS else Division.COLUMNS

    @property
    def dq_consumers(self) -> int:
        """Consumers that compute dQ."""
        return 1 if self.division is Division.NONE else CONSUMERS

    @property
    def dq_extents(self) -> tuple[int, ...]:
        """Columns of the result of each product `dq`."""
        if self.division is not Division.COLUMNS:
            return (self.columns,)
        whole, odd = divmod(self.k_tile.panels, CONSUMERS)
        return (self.tile_m,) * whole + (self.tile_m // CONSUMERS,) * odd

    @property
    def dq(self) -> tuple[Wgmma, ...]:
        """Products of a consumer: dQ = dS K of 64 queries, or dQ^T = K^T dS^T of each of its column panels; of an odd
        panel, half of the queries."""
        k = SmemOperand(self.k_tile, Major.MN)
        ds = SmemOperand(self.ds_tile, Major.K, self.ds_stages, self.ds_tile.nbytes)
        b, a = (ds, k) if self.division is Division.COLUMNS else (k, ds)
        return tuple(Wgmma(self.dtype, n=n, k=TILE_N, b=b, a=a) for n in self.dq_extents)

    @property
    def dq_bytes(self) -> int:
        """Bytes of a consumer's share of a step's dQ, in float32."""
        return 4 * ROWS * sum(self.dq_extents)

    @property
    def dq_tile(self) -> Tile | None:
        """dq of 64 queries, staged in a consumer's dQ buffer."""
        tile = Tile(ROWS, self.head_dim)
        fits = self.division is Division.QUERIES and tile.nbytes <= self.dq_bytes
        return tile if self.last_finishes and fits else None

    @property
    def sum_bytes(self) -> int:
        """Bytes of the dQ sum of other key blocks, to which the last key block adds its dQ."""
        return CONSUMERS * self.dq_bytes if self.last_finishes else 0

    @property
    def smem_used(self) -> int:
        """Shared memory in use, in bytes."""
        used = self.k_tile.nbytes + self.v_tile.nbytes + self.q_stages * (self.q_tile.nbytes + self.rows_bytes)
        used += self.stages * self.do_tile.nbytes + self.ds_stages * self.ds_tile.nbytes
        return used + self.dq_consumers * self.dq_bytes + self.sum_bytes + BARRIER_BYTES

    @property
    def semaphores(self) -> int:
        """Counters per query block: one that orders additions, or a first-writer flag for each consumer's dQ share."""
        return 1 if self.deterministic else self.dq_consumers if self.first_writer else 0

    @property
    def placement(self) -> Placement:
        if self.division is Division.COLUMNS:
            return ByColumns(self.tile_m, self.k_tile.panels * PANEL_COLUMNS)
        return ByQueries(self.tile_m, self.columns)

    @property
    def statistics_ahead(self) -> bool:
        """True if registers can hold a statistic of all of a thread's queries beside its accumulators."""
        return not (self.has_softcap or self.has_score_mod) and self.tile_m < CONSUMERS * ROWS

    @property
    def reducers(self) -> int:
        """Warps that add a consumer's dQ to its sum. A deterministic run has several, which take the steps round-robin:
        waiting for the semaphore, adding and releasing take longer than a step."""
        return REDUCERS if self.deterministic else 1
