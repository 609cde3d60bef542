"""What the generated backward depends on, and the shapes that follow from it.

Everything works on transposed scores: S^T = K Q^T has keys as rows. A warpgroup has 64 of a CTA's 128 keys, so that its
P^T and dS^T are, rounded to 16 bits where they stand in registers, the left operands of dV += P^T dO and dK += dS^T Q.
Only dS goes through shared memory, for dQ = dS K, which sums over the keys of both warpgroups.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...bwd.blocks import RowBlocks
from ...bwd.variant import Variant
from ...pipeline.smem import Tile
from ..wgmma import K_PER_MMA, ROWS, Major, SmemOperand, Wgmma
from .placement import CONSUMERS, ByColumns, ByQueries

TILE_N = CONSUMERS * ROWS  # keys of a CTA
REDUCERS = 3  # warps that may add dQ to its sum
PANEL_COLUMNS = Tile(TILE_N, 1).panel_columns
BARRIER_BYTES = 512  # upper bound of all mbarriers, for the smem budget
L2_GROUP_BYTES = 24 << 20  # of the L2 cache (H100: 50 MB), for what the heads that advance together read and add to
LEAST_SHARE = 8  # CTAs of a pair that run at a time and find each other's queries in the L2 cache, at least
MUCH_LATER = 40  # times the steps of a kernel: by how many its last CTA begins so late that chains are shorter
MOST_SUMS = 16  # of dQ of query blocks, for as many pairs or fewer
SHORTER = 128  # times the steps of a kernel: by how many steps its last CTA may begin after its first


class Division(enum.Enum):
    """How two warpgroups divide a step's dQ."""

    QUERIES = "dQ = dS K of 64 queries each"
    COLUMNS = "dQ^T = K^T dS^T of as many panels of columns each, an odd one by halves of its queries"
    NONE = "dQ = dS K by the first of them"


class ByThread(RowBlocks):
    """Blocks whose statistics lie as threads of `compute` load them."""

    def arranged(self, statistics: cute.Tensor) -> cute.Tensor:
        """Of every 16 queries, the four that one thread of `compute` needs side by side: 2 j, 2 j + 1, 2 j + 8 and
        2 j + 9."""
        shape, stride = statistics.shape, statistics.stride
        layout = cute.make_layout(((2, 4, 2, self.tile_m // 16), *shape[1:]), stride=((1, 4, 2, 16), *stride[1:]))
        return cute.make_tensor(statistics.iterator, layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps(Variant):
    """A CTA's way through the query blocks, whoever computes what. The fields are the compile key.

    tile_m, q_stages, stages, ds_stages, together: see `tiles`. sms: CTAs that the chip runs at a time. chained: key
    blocks add to several sums of a query block's dQ, see `chains`.

    Raises:
        ValueError: the tiles do not fit the shared memory, or there is one of dS, which is read a step late.
    """

    tile_m: int
    q_stages: int
    stages: int
    ds_stages: int
    sms: int
    smem_bytes: int
    together: int | None
    chained: bool = False
    column_unit: ClassVar[int] = K_PER_MMA
    ctas: ClassVar[int] = 1
    first_writer: ClassVar[bool] = False
    trims: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.ds_stages < 2:
            raise ValueError("ds_stages is 1, expected 2 at least: dQ is computed a step after dS")
        if self.held_bytes > self.smem_bytes:
            raise ValueError(
                f"{self.tile_m} x {self.cluster_tile_n} tiles hold {self.held_bytes} bytes, there are {self.smem_bytes}"
            )

    @property
    def differs_by_head(self) -> bool:
        """Whether query heads of a group go through other query blocks, or through them in another order."""
        return self.lists_by_head or (self.folds and self.group > 1)

    @property
    def q_tile(self) -> Tile:
        return Tile(self.tile_m, self.head_dim)

    @property
    def do_tile(self) -> Tile:
        return Tile(self.tile_m, self.head_dim_v)

    @property
    def dk_tile(self) -> Tile:
        """64 keys, whose gradient a warpgroup stores by itself."""
        return Tile(ROWS, self.head_dim)

    @property
    def dv_tile(self) -> Tile:
        return Tile(ROWS, self.head_dim_v)

    @property
    def query_bytes(self) -> int:
        """What a query has in global memory: Q, dO and the sum of dQ."""
        return 6 * self.columns + 2 * self.columns_v

    @property
    def staggered(self) -> bool:
        """Whether CTAs that run at the same time begin at different query blocks and go round. Where the first to come
        stores, the others then find dQ stored. No CTA waits for the CTAs it runs beside: additions have no order. With
        a mask each CTA begins at its diagonal."""
        return self.first_writer and not self.deterministic and not self.masked and not self.has_blocks

    @property
    def follows(self) -> bool:
        """Whether ordered additions ascend with the key blocks: block b adds to every query block after block b - 1,
        whose CTA has a lower launch index. All CTAs go through the query blocks in the same direction, so block b
        runs some steps behind block b - 1."""
        return self.deterministic and not self.descending and not self.has_blocks

    def l2_group(self, n_blocks: Int32, seqlen_q: Int32, pairs: Int32) -> Int32:
        """As many as the L2 cache serves.

        Ascending key blocks start a causal problem's longest work first; at least so many pairs then advance together
        that the longest work of the last ones begins early enough. Where key blocks descend see `filling`, where one
        follows another `following`.
        """
        if self.descending:
            return self.filling(n_blocks, pairs)
        fit = L2_GROUP_BYTES // self.query_bytes // self.group // cutlass.max(seqlen_q, 1)
        if self.follows:
            return self.following(n_blocks, seqlen_q, pairs, fit)
        balanced = 2 * self.sms // n_blocks + 1 if self.has_right else 1
        return cutlass.min(Int32(cutlass.max(fit, balanced)), pairs)

    def filling(self, n_blocks: Int32, pairs: Int32) -> Int32:
        """The pairs whose key blocks, with work of all lengths, run at a time, or twice as many with a group that does
        not fold: so the chip is not left with a pair's longest work."""
        n_blocks, pairs = cutlass.max(n_blocks, 1), cutlass.max(pairs, 1)
        together = (1 if self.group == 1 or self.folds else 2) * self.most_blocks // n_blocks
        together = cutlass.max(together, 1)
        l2_groups = (pairs + together - 1) // together  # of the same size, or nearly
        if self.folds:
            l2_groups += cutlass.min(l2_groups - 1, 1) * (l2_groups % 2)  # the last one ends evenly
        return (pairs + l2_groups - 1) // l2_groups

    def following(self, n_blocks: Int32, seqlen_q: Int32, pairs: Int32, fit: Int32) -> Int32:
        """The more pairs advance together, the fewer blocks of each run at a time, and the sooner the last of them
        begins after the first; it does so once in a kernel, for later blocks begin as earlier ones end. But the fewer
        blocks share what they read and add to."""
        steps = cutlass.max((seqlen_q + self.tile_m - 1) // self.tile_m * self.group, 1)
        n_blocks, pairs = cutlass.max(n_blocks, 1), cutlass.max(pairs, 1)
        soon = SHORTER * self.most_blocks * self.most_blocks // n_blocks // pairs // steps
        together = cutlass.min(cutlass.max(soon, fit), self.most_blocks // LEAST_SHARE)
        together = cutlass.min(cutlass.max(together, 1), pairs) if self.together is None else Int32(self.together)
        l2_groups = (pairs + together - 1) // together  # of the same size, or nearly
        return Int32((pairs + l2_groups - 1) // l2_groups)

    def chains(self, n_blocks: int, seqlen_q: int, pairs: int) -> int:
        """How many sums of dQ a query block is to have: 1, or more where with few pairs key blocks that follow each
        other would begin late. Key block b adds to sum b % chains, after block b - chains. The number follows from the
        problem and the kind of chip alone, so that results repeat."""
        steps = max(1, n_blocks * pairs * self.group * -(-seqlen_q // self.tile_m))
        late = min(n_blocks - 1, self.most_blocks // pairs) * self.most_blocks * MUCH_LATER
        return max(1, min(-(-late // steps), MOST_SUMS // pairs, n_blocks)) if self.follows else 1

    def chains_of(self, args: Any) -> Int32:
        """`chains` of a launch, where additions are `chained`."""
        return args.dq_sum.shape[3]

    @property
    def most_blocks(self) -> int:
        """Key blocks that run at a time."""
        return self.sms // self.ctas

    @property
    def folds(self) -> bool:
        """Whether a deterministic causal problem's sections have their shortest work first and last by turns. Where the
        longest always came last, the chip would wait for it half empty."""
        return self.descending and not self.has_left and not self.has_blocks

    def wave(self, n_blocks: Int32, l2_group: Int32, pairs: Int32) -> Int32 | None:
        """All blocks of a section. A section alone, of more blocks than run at a time, has waves: else its longest work
        would come last, a GQA group's times as long as a block."""
        if not self.folds:
            return None
        if self.group == 1:
            return n_blocks
        own = cutlass.max(self.most_blocks // cutlass.max(l2_group, 1), 1)
        return Int32(cutlass.select_(l2_group < pairs, n_blocks, own))

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
class Config(Steps):
    """Two warpgroups with 64 keys each, which divide a step's dQ. claims: see `tiles`."""

    first_writer: bool
    cta_tile_n: ClassVar[int] = TILE_N
    cluster_tile_n: ClassVar[int] = TILE_N

    def l2_group(self, n_blocks: Int32, seqlen_q: Int32, pairs: Int32) -> Int32:
        """Without an order a pair's CTAs run at the same time and find its queries in the L2 cache: one pair without a
        mask or a GQA group. Causal or by lists, where a pair's blocks have work of all lengths: see `filling`.
        """
        if self.has_right or self.has_blocks:
            return self.filling(n_blocks, pairs)
        if self.staggered or (self.group == 1 and not self.follows):
            return Int32(1)
        return Steps.l2_group(self, n_blocks, seqlen_q, pairs)

    @property
    def trims(self) -> bool:
        """Whether the first queries that see a CTA's keys may see none of the second warpgroup's."""
        return self.has_right and not self.has_blocks and self.tile_m == ROWS

    @property
    def leaves_early(self) -> bool:
        """Whether dV and dK leave the registers beside the last dQ. With steps of 80 queries that spills others."""
        return self.tile_m != 80

    @property
    def has_place_for_dk(self) -> bool:
        """Whether stages of Q and dO hold a warpgroup's dK."""
        return self.leaves_early and min(self.q_tile.nbytes, self.do_tile.nbytes) >= self.dk_tile.nbytes

    @property
    def ds_tile(self) -> Tile:
        """dS, a row per query: the keys of a warpgroup fill a panel."""
        return Tile(self.tile_m, TILE_N)

    @property
    def division(self) -> Division:
        """Columns can be divided with any number of queries, and half of the second panel may be padding."""
        if self.tile_m == CONSUMERS * ROWS:
            return Division.QUERIES
        is_padded = PANEL_COLUMNS < self.columns < CONSUMERS * PANEL_COLUMNS
        return Division.NONE if is_padded and self.tile_m == ROWS else Division.COLUMNS

    @property
    def dq_consumers(self) -> int:
        """Warpgroups that compute dQ."""
        return 1 if self.division is Division.NONE else CONSUMERS

    @property
    def dq(self) -> tuple[Wgmma, ...]:
        """A warpgroup's products: dQ = dS K of 64 queries, or dQ^T = K^T dS^T of each of its panels of columns and, of
        an odd one, for half of the queries."""
        k = SmemOperand(self.k_tile, Major.MN)
        ds = SmemOperand(self.ds_tile, Major.K, self.ds_stages, self.ds_tile.nbytes)
        if self.division is not Division.COLUMNS:
            return (Wgmma(self.dtype, n=self.columns, k=TILE_N, b=k, a=ds),)
        whole, odd = divmod(self.k_tile.panels, CONSUMERS)
        queries = [self.tile_m] * whole + [self.tile_m // CONSUMERS] * odd
        return tuple(Wgmma(self.dtype, n=n, k=TILE_N, b=ds, a=k) for n in queries)

    @property
    def dq_bytes(self) -> int:
        """What a warpgroup has of a step's dQ, in float32."""
        return 4 * ROWS * sum(product.n for product in self.dq)

    @property
    def held_bytes(self) -> int:
        """Shared memory in use."""
        held = self.k_tile.nbytes + self.v_tile.nbytes + self.q_stages * (self.q_tile.nbytes + self.rows_bytes)
        held += self.stages * self.do_tile.nbytes + self.ds_stages * self.ds_tile.nbytes
        return held + self.dq_consumers * self.dq_bytes + BARRIER_BYTES

    @property
    def semaphores(self) -> int:
        """Counters of a block of queries: one that orders additions, or one for each warpgroup's share of dQ that says
        whether anybody has stored it."""
        return 1 if self.deterministic else self.dq_consumers if self.first_writer else 0

    @property
    def row_blocks(self) -> RowBlocks:
        """What the kernels around the main one depend on."""
        placement = ByColumns(self.tile_m, self.k_tile.panels * PANEL_COLUMNS)
        if self.division is not Division.COLUMNS:
            placement = ByQueries(self.tile_m, self.columns)
        return ByThread(
            self.dtype, self.head_dim, self.head_dim_v, self.tile_m, placement, self.varlen, self.has_sink,
            self.has_dlse, semaphores=self.semaphores, first_stores=self.semaphores > 0,
            list_rows=self.mods.block[0] if self.ordered_by_lists else 0, pdl=True, chained=self.chained,
        )  # fmt: skip

    @property
    def statistics_ahead(self) -> bool:
        """Whether registers hold a statistic of all of a thread's queries beside its accumulators."""
        return not (self.has_softcap or self.has_score_mod) and self.tile_m < CONSUMERS * ROWS

    @property
    def reducers(self) -> int:
        """Warps that add a warpgroup's dQ to its sum. In a deterministic run several, which take the steps in turn: to
        wait for a turn, to add and to pass the turn on takes longer than a step."""
        return REDUCERS if self.deterministic else 1
