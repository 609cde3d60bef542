"""Launch order of the backward: L2 groups of (head, sequence) pairs, and the order of ordered additions to dQ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ....bwd.variant import BackwardVariant
from ....runtime.dsl import cutlass
from ...wgmma import K_PER_MMA

if TYPE_CHECKING:
    from cutlass import Int32

L2_GROUP_BYTES = 24 << 20  # L2 budget (H100: 50 MB) for what the pairs of an L2 group read and add to
MIN_BLOCKS_PER_PAIR = 8  # minimum concurrent CTAs of a pair; they share its queries in L2
STEPS_PER_BLOCK = 10  # ratio of a key block's steps to a pair's key blocks, above which the start lag hardly counts
CHAIN_STEPS_PER_LAG = 40  # below this ratio of kernel steps to start lag, a query block gets several dQ sums
MAX_SUMS = 16  # maximum of (dQ sums of a query block) x (pairs)
MIN_STEPS_PER_LAG = 128  # minimum ratio of kernel steps to the start lag of the last CTA, by the L2 group size


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder(BackwardVariant):
    """Order in which CTAs start and iterate. Subclasses add `ctas`, the CTAs of a block of `cluster_tile_n` keys.

    tile_m: queries per step. sms: CTAs that the chip runs at a time. pairs_per_group: pairs in an L2 group, for ordered
    ascending key blocks; None: see `l2_group_that_follows`. chained: key blocks add to several sums of a query block's
    dQ, see `chains`. parted: several CTAs share a key block; each has some of the query blocks that see it, and the
    same of every query head. first_writer, last_finishes: see `tiles`.
    """

    tile_m: int
    sms: int
    pairs_per_group: int | None
    chained: bool = False
    parted: bool = False
    first_writer: bool = False
    last_finishes: bool = False
    column_unit: ClassVar[int] = K_PER_MMA

    @property
    def differs_by_head(self) -> bool:
        """True if the query heads of a group iterate over different query blocks or in a different order."""
        return self.lists_by_head or (self.folds and self.group > 1)

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
    def most_apart(self) -> int:
        """Maximum number of steps between the starts of consecutive staggered key blocks. A CTA comes to a query block
        so many steps after the CTA before it. Meanwhile all CTAs of the chip load Q and dO and add to dQ of so many
        steps; these bytes must not exceed the L2 budget. Evenly spaced starts are closer where the Q, dO and dQ of all
        running heads fit the budget."""
        return max(L2_GROUP_BYTES // (self.sms * self.tile_m * self.query_bytes), 1)

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
        return cutlass.min(cutlass.Int32(cutlass.max(by_l2, balanced)), pairs)

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
            else cutlass.Int32(self.pairs_per_group)
        )
        l2_groups = (pairs + pairs_per_group - 1) // pairs_per_group  # of about equal size
        return cutlass.Int32((pairs + l2_groups - 1) // l2_groups)

    def chains(self, n_blocks: int, seqlen_q: int, pairs: int) -> int:
        """Return the number of dQ sums of a query block: 1, or more if ordered key blocks of few pairs would start
        late. Key block b adds to sum b % chains, after block b - chains. The number depends only on the problem and the
        kind of chip, so results repeat. With few key blocks for the queries, a second sum takes longer than the lag."""
        if self.group * -(-seqlen_q // self.tile_m) >= STEPS_PER_BLOCK * n_blocks:
            return 1
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
        """Return the key blocks of a wave: all blocks of an L2 group. A pair with more blocks than run at a time is
        split into waves of so many (H100, causal, d128: 1.12 and 1.45 times as fast with 32k and 64k keys and 32/8
        heads, 1.19 and 1.15 with 64k and 128k and 16 heads). So is a single group of a GQA problem; otherwise its
        longest work, of all heads of a GQA group, would come last."""
        if not self.folds:
            return None
        wave_blocks = cutlass.max(self.concurrent_blocks // cutlass.max(l2_group, 1), 1)
        is_whole = n_blocks <= self.concurrent_blocks
        if self.group > 1:
            is_whole = is_whole & (l2_group < pairs)
        return cutlass.Int32(cutlass.select_(is_whole, n_blocks, wave_blocks))
