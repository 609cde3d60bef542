"""Compile-time configuration of the backward kernel, and the shapes and operands that follow from it.

All products work on transposed scores: S^T = K Q^T has keys as rows. A consumer has 64 of a CTA's 128 keys. Its P^T and
dS^T, rounded to 16 bits in registers, are the left operands of dV += P^T dO and dK += dS^T Q. Only dS passes through
shared memory, for dQ = dS K, which sums over the keys of both consumers.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...bwd.blocks import RowBlocks
from ...bwd.variant import BackwardVariant
from ...pipeline.smem import Tile
from ..wgmma import K_PER_MMA, ROWS, Major, SmemOperand, Wgmma
from .placement import CONSUMERS, ByColumns, ByQueries

TILE_N = CONSUMERS * ROWS  # keys per CTA
REDUCERS = 3  # maximum number of warps that add dQ to its sum
PANEL_COLUMNS = Tile(TILE_N, 1).panel_columns
BARRIER_BYTES = 512  # upper bound for all mbarriers, in the smem budget
L2_GROUP_BYTES = 24 << 20  # L2 budget (H100: 50 MB) for what the pairs of an L2 group read and add to
MIN_BLOCKS_PER_PAIR = 8  # minimum concurrent CTAs of a pair; they share its queries in L2
CHAIN_STEPS_PER_LAG = 40  # below this ratio of kernel steps to start lag, a query block gets several dQ sums
MAX_SUMS = 16  # maximum of (dQ sums of a query block) x (pairs)
MIN_STEPS_PER_LAG = 128  # minimum ratio of kernel steps to the start lag of the last CTA, by the L2 group size


class Division(enum.Enum):
    """Division of the dQ of a step between two consumers."""

    QUERIES = "dQ = dS K of 64 queries each"
    COLUMNS = "dQ^T = K^T dS^T of as many panels of columns each, an odd one by halves of its queries"
    NONE = "dQ = dS K by the first of them"


class ThreadOrderedBlocks(RowBlocks):
    """Row blocks with statistics in the order in which threads of `compute` load them."""

    def permute_statistics(self, statistics: cute.Tensor) -> cute.Tensor:
        """Make the four of every 16 queries that belong to one thread contiguous: 2j, 2j + 1, 2j + 8, 2j + 9."""
        shape, stride = statistics.shape, statistics.stride
        layout = cute.make_layout(((2, 4, 2, self.tile_m // 16), *shape[1:]), stride=((1, 4, 2, 16), *stride[1:]))
        return cute.make_tensor(statistics.iterator, layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90BackwardSteps(BackwardVariant):
    """Loop of a CTA over query blocks: what all backward kernels share. The fields are the compile key.

    tile_m, q_stages, stages, ds_stages, together: see `tiles`. sms: CTAs that the chip runs at a time. chained: key
    blocks add to several sums of a query block's dQ, see `chains`.

    Raises:
        ValueError: the tiles do not fit in shared memory, or dS has one stage although it is read one step late.
    """

    tile_m: int
    q_stages: int
    stages: int
    ds_stages: int
    sms: int
    smem_bytes: int
    pairs_per_group: int | None
    chained: bool = False
    column_unit: ClassVar[int] = K_PER_MMA
    ctas: ClassVar[int] = 1
    first_writer: ClassVar[bool] = False
    trims: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.ds_stages < 2:
            raise ValueError("ds_stages is 1, expected 2 at least: dQ is computed a step after dS")
        if self.smem_used > self.smem_bytes:
            raise ValueError(
                f"{self.tile_m} x {self.cluster_tile_n} tiles hold {self.smem_used} bytes, there are {self.smem_bytes}"
            )

    @property
    def differs_by_head(self) -> bool:
        """True if the query heads of a group iterate over different query blocks or in a different order."""
        return self.lists_by_head or (self.folds and self.group > 1)

    @property
    def q_tile(self) -> Tile:
        return Tile(self.tile_m, self.head_dim)

    @property
    def do_tile(self) -> Tile:
        return Tile(self.tile_m, self.head_dim_v)

    @property
    def dk_tile(self) -> Tile:
        """dK of 64 keys, which a consumer stores by itself."""
        return Tile(ROWS, self.head_dim)

    @property
    def dv_tile(self) -> Tile:
        return Tile(ROWS, self.head_dim_v)

    @property
    def query_bytes(self) -> int:
        """Bytes per query in global memory: Q, dO and the dQ sum."""
        return 6 * self.columns + 2 * self.columns_v

    @property
    def staggered(self) -> bool:
        """True if concurrent CTAs start at different query blocks and wrap around. Where the first writer stores dQ,
        the others then find it initialised. Additions have no order, so no CTA waits for concurrent CTAs. With a mask
        each CTA starts at its diagonal instead."""
        return self.first_writer and not self.deterministic and not self.masked and not self.has_blocks

    @property
    def ascending_order(self) -> bool:
        """True if ordered additions go by ascending key block: block b adds to every query block after block b - 1,
        whose CTA has a lower launch index. All CTAs iterate in the same direction, so block b runs some steps behind
        block b - 1."""
        return self.deterministic and not self.descending and not self.has_blocks

    def l2_group(self, n_blocks: Int32, seqlen_q: Int32, pairs: Int32) -> Int32:
        """Return the number of (head, sequence) pairs in an L2 group: as many as the L2 cache serves. Ascending key
        blocks start the longest work of a causal problem first; the group then has enough pairs that the longest work
        of the last pairs starts early. For descending key blocks see `l2_group_that_fills`, for ordered ascending ones
        `l2_group_that_follows`."""
        if self.descending:
            return self.l2_group_that_fills(n_blocks, pairs)
        by_l2 = L2_GROUP_BYTES // self.query_bytes // self.group // cutlass.max(seqlen_q, 1)
        if self.ascending_order:
            return self.l2_group_that_follows(n_blocks, seqlen_q, pairs, by_l2)
        balanced = 2 * self.sms // n_blocks + 1 if self.has_right else 1
        return cutlass.min(Int32(cutlass.max(by_l2, balanced)), pairs)

    def l2_group_that_fills(self, n_blocks: Int32, pairs: Int32) -> Int32:
        """Return the number of pairs whose key blocks, of all lengths, run at a time; twice as many for a query group
        that does not fold. Then the longest work of a pair does not run alone at the end."""
        n_blocks, pairs = cutlass.max(n_blocks, 1), cutlass.max(pairs, 1)
        pairs_per_group = (1 if self.group == 1 or self.folds else 2) * self.concurrent_blocks // n_blocks
        pairs_per_group = cutlass.max(pairs_per_group, 1)
        l2_groups = (pairs + pairs_per_group - 1) // pairs_per_group  # of about equal size
        if self.folds:
            l2_groups += cutlass.min(l2_groups - 1, 1) * (l2_groups % 2)  # an even number: the last group ends evenly
        return (pairs + l2_groups - 1) // l2_groups

    def l2_group_that_follows(self, n_blocks: Int32, seqlen_q: Int32, pairs: Int32, by_l2: Int32) -> Int32:
        """Return the group size for ordered ascending key blocks. With more pairs in a group, fewer blocks of each pair
        run at a time, and the last of them starts sooner after the first. This lag occurs once per kernel, because
        later blocks start as earlier ones end. But fewer blocks then share what they read and add to."""
        steps = cutlass.max((seqlen_q + self.tile_m - 1) // self.tile_m * self.group, 1)
        n_blocks, pairs = cutlass.max(n_blocks, 1), cutlass.max(pairs, 1)
        by_lag = MIN_STEPS_PER_LAG * self.concurrent_blocks * self.concurrent_blocks // n_blocks // pairs // steps
        pairs_per_group = cutlass.min(cutlass.max(by_lag, by_l2), self.concurrent_blocks // MIN_BLOCKS_PER_PAIR)
        pairs_per_group = (
            cutlass.min(cutlass.max(pairs_per_group, 1), pairs)
            if self.pairs_per_group is None
            else Int32(self.pairs_per_group)
        )
        l2_groups = (pairs + pairs_per_group - 1) // pairs_per_group  # of about equal size
        return Int32((pairs + l2_groups - 1) // l2_groups)

    def chains(self, n_blocks: int, seqlen_q: int, pairs: int) -> int:
        """Return the number of dQ sums of a query block: 1, or more if ordered key blocks of few pairs would start
        late. Key block b adds to sum b % chains, after block b - chains. The number depends only on the problem and the
        kind of chip, so results repeat."""
        steps = max(1, n_blocks * pairs * self.group * -(-seqlen_q // self.tile_m))
        lag = min(n_blocks - 1, self.concurrent_blocks // pairs) * self.concurrent_blocks * CHAIN_STEPS_PER_LAG
        return max(1, min(-(-lag // steps), MAX_SUMS // pairs, n_blocks)) if self.ascending_order else 1

    def chains_of(self, args: Any) -> Int32:
        """Return `chains` of a launch with `chained` additions."""
        return args.dq_sum.shape[3]

    @property
    def concurrent_blocks(self) -> int:
        """Key blocks that run at a time."""
        return self.sms // self.ctas

    @property
    def folds(self) -> bool:
        """True if the L2 groups of a deterministic causal problem alternate between shortest work first and last. With
        the longest work always last, the chip would wait for it half empty."""
        return self.descending and not self.has_left and not self.has_blocks

    def wave(self, n_blocks: Int32, l2_group: Int32, pairs: Int32) -> Int32 | None:
        """Return the key blocks of a wave: all blocks of an L2 group. A single group with more blocks than run at a
        time is split into waves; otherwise its longest work, of all heads of a GQA group, would come last."""
        if not self.folds:
            return None
        if self.group == 1:
            return n_blocks
        wave_blocks = cutlass.max(self.concurrent_blocks // cutlass.max(l2_group, 1), 1)
        return Int32(cutlass.select_(l2_group < pairs, n_blocks, wave_blocks))

    @property
    def scores(self) -> Wgmma:
        """S^T = K Q^T."""
        q = SmemOperand(self.q_tile, Major.K, self.q_stages, self.q_tile.nbytes)
        return Wgmma(self.dtype, n=self.tile_m, k=self.columns, b=q, a=SmemOperand(self.k_tile, Major.K))

    @property
    def dp(self) -> Wgmma:
        """dP^T = V dO^T."""
        do = SmemOperand(self.do_tile, Major.K, self.stages, self.do_tile.nbytes)
        return Wgmma(self.dtype, n=self.tile_m, k=self.columns_v, b=do, a=SmemOperand(self.v_tile, Major.K))

    @property
    def dv(self) -> Wgmma:
        """dV += P^T dO, P^T from registers."""
        do = SmemOperand(self.do_tile, Major.MN, self.stages, self.do_tile.nbytes)
        return Wgmma(self.dtype, n=self.columns_v, k=self.tile_m, b=do)

    @property
    def dk(self) -> Wgmma:
        """dK += dS^T Q, dS^T from registers."""
        q = SmemOperand(self.q_tile, Major.MN, self.q_stages, self.q_tile.nbytes)
        return Wgmma(self.dtype, n=self.columns, k=self.tile_m, b=q)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sm90BackwardConfig(Sm90BackwardSteps):
    """Two consumers with 64 keys each, which divide the dQ of a step. first_writer: see `tiles`."""

    first_writer: bool
    cta_tile_n: ClassVar[int] = TILE_N
    cluster_tile_n: ClassVar[int] = TILE_N

    def l2_group(self, n_blocks: Int32, seqlen_q: Int32, pairs: Int32) -> Int32:
        """Return the group size. Without an order, without a mask and without a GQA group it is 1: the CTAs of a pair
        run at a time and find its queries in L2. Causal or with block lists, see `l2_group_that_fills`."""
        if self.has_right or self.has_blocks:
            return self.l2_group_that_fills(n_blocks, pairs)
        if self.staggered or (self.group == 1 and not self.ascending_order):
            return Int32(1)
        return Sm90BackwardSteps.l2_group(self, n_blocks, seqlen_q, pairs)

    @property
    def trims(self) -> bool:
        """True if the first queries that see a CTA's keys may see none of the second consumer's keys."""
        return self.has_right and not self.has_blocks and self.tile_m == ROWS

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
    def dq(self) -> tuple[Wgmma, ...]:
        """Products of a consumer: dQ = dS K of 64 queries, or dQ^T = K^T dS^T of each of its column panels; of an odd
        panel, half of the queries."""
        k = SmemOperand(self.k_tile, Major.MN)
        ds = SmemOperand(self.ds_tile, Major.K, self.ds_stages, self.ds_tile.nbytes)
        if self.division is not Division.COLUMNS:
            return (Wgmma(self.dtype, n=self.columns, k=TILE_N, b=k, a=ds),)
        whole, odd = divmod(self.k_tile.panels, CONSUMERS)
        queries = [self.tile_m] * whole + [self.tile_m // CONSUMERS] * odd
        return tuple(Wgmma(self.dtype, n=n, k=TILE_N, b=ds, a=k) for n in queries)

    @property
    def dq_bytes(self) -> int:
        """Bytes of a consumer's share of a step's dQ, in float32."""
        return 4 * ROWS * sum(product.n for product in self.dq)

    @property
    def smem_used(self) -> int:
        """Shared memory in use, in bytes."""
        used = self.k_tile.nbytes + self.v_tile.nbytes + self.q_stages * (self.q_tile.nbytes + self.rows_bytes)
        used += self.stages * self.do_tile.nbytes + self.ds_stages * self.ds_tile.nbytes
        return used + self.dq_consumers * self.dq_bytes + BARRIER_BYTES

    @property
    def semaphores(self) -> int:
        """Counters per query block: one that orders additions, or a first-writer flag for each consumer's dQ share."""
        return 1 if self.deterministic else self.dq_consumers if self.first_writer else 0

    @property
    def row_blocks(self) -> RowBlocks:
        """Configuration of the kernels before and after the main kernel."""
        placement = ByColumns(self.tile_m, self.k_tile.panels * PANEL_COLUMNS)
        if self.division is not Division.COLUMNS:
            placement = ByQueries(self.tile_m, self.columns)
        return ThreadOrderedBlocks(
            self.dtype, self.head_dim, self.head_dim_v, self.tile_m, placement, self.varlen, self.has_sink,
            self.has_dlse, semaphores=self.semaphores, first_stores=self.semaphores > 0,
            list_rows=self.mods.block[0] if self.ordered_by_lists else 0, pdl=True, chained=self.chained,
        )  # fmt: skip

    @property
    def statistics_ahead(self) -> bool:
        """True if registers can hold a statistic of all of a thread's queries beside its accumulators."""
        return not (self.has_softcap or self.has_score_mod) and self.tile_m < CONSUMERS * ROWS

    @property
    def reducers(self) -> int:
        """Warps that add a consumer's dQ to its sum. A deterministic run has several, which take the steps round-robin:
        waiting for the semaphore, adding and releasing take longer than a step."""
        return REDUCERS if self.deterministic else 1
