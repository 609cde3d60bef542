"""Forward plan: from a specification to a configuration and the order of work tiles."""

from __future__ import annotations

import math

from ...core.order import even_l2_groups
from ...fwd import plan
from ...fwd.plan import LaunchSizes, Scalars, work_tiles
from ...fwd.splits import JOINING_BYTES, blocks_of_part, choose_splits
from ...fwd.variant import ForwardVariant
from ...pipeline.fragment import ROWS_PER_WARP
from ...runtime import plan as plans
from ...runtime.choice import columns, given
from ...runtime.device import Chip
from ...runtime.spec import AttentionSpec, ProblemSize
from ..wgmma import ROWS
from .config import Sm90ForwardConfig
from .kernel import KERNEL
from .tiles import ForwardTiles, tiles_for

MANY = LaunchSizes._field_defaults["most_l2_groups"]
# Share of L2 for K and V of a larger last L2 group. On an H100, 62 MB are 1.4 % slower than 32 MB (d128, 2k keys).
LAST_SHARE = 0.64


class Sm90Forward(plan.ForwardDirection[Sm90ForwardConfig]):
    """Forward plan on sm_90. tiles: replaces the row of the tile table, for tuning."""

    kernel = KERNEL

    def __init__(self, spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: ForwardTiles | None = None) -> None:
        self.choice = tiles_for(spec, chip, extent) if tiles is None else given(tiles)
        self.tiles = self.choice.row
        cfg = configure(spec, extent, chip, self.tiles)
        self.splits = splits_for(spec, extent, chip, self.tiles)
        l2_group, most = l2_groups(spec, extent, chip, cfg, self.tiles)
        part_blocks = blocks_of_part(extent.max_seqlen_k, cfg.tile_n, self.splits)
        sizes = LaunchSizes(extent.max_seqlen_q, extent.batch, l2_group, self.splits, chip.sms, part_blocks, most)
        super().__init__(chip, cfg, Scalars.of(spec), sizes)

    def __str__(self) -> str:
        cfg = self.cfg
        parts = f"keys in {self.splits} parts, " if cfg.split else ""
        pairs = "pairs of CTAs, " if cfg.ctas == 2 else ""
        return (
            f"forward {self.choice.name}: {cfg.rows} x {cfg.tile_n}, {cfg.stages} K/V stages, {cfg.packed_heads} heads "
            f"packed, {parts}{pairs}{'ping-pong, ' * cfg.ping_pong}rescale threshold {cfg.rescale_threshold:g}, "
            f"{cfg.schedule.name.lower()} ({self.choice.reason})"
        )


def configure(
    spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: ForwardTiles | None = None
) -> Sm90ForwardConfig:
    """Return the compile-time configuration of a problem."""
    tiles = tiles or tiles_for(spec, chip, extent).row
    splits = splits_for(spec, extent, chip, tiles)
    return Sm90ForwardConfig(
        **Sm90ForwardConfig.options(spec, packed_heads(spec, extent, tiles), splits),
        **columns(tiles, Sm90ForwardConfig),
        smem_bytes=chip.smem_per_block - (JOINING_BYTES if splits > 1 else 0),
    )


def packed_heads(spec: AttentionSpec, extent: ProblemSize, tiles: ForwardTiles) -> int:
    """Return the query heads per tile (pack_gqa). Packing pays if the rows of one head leave half of a tile empty, or
    as the table says."""
    if spec.has_blocks:
        return 1  # query heads may have blocks of their own
    if tiles.consumers == 1:
        return packed_heads_of_one(spec)
    is_short = 2 * extent.max_seqlen_q <= tiles.consumers * ROWS
    return math.gcd(spec.group, ROWS_PER_WARP) if is_short or tiles.packs_heads else 1


def packed_heads_of_one(spec: AttentionSpec) -> int:
    """Return the query heads per tile of 64 rows."""
    return spec.group if spec.group <= ROWS else math.gcd(spec.group, ROWS)


def splits_for(spec: AttentionSpec, extent: ProblemSize, chip: Chip, tiles: ForwardTiles) -> int:
    """Return the number of key parts per work tile (split-KV)."""
    if tiles.splits is not None:
        return tiles.splits
    if spec.has_blocks:
        return 1
    count = work_tiles(spec, extent, packed_heads(spec, extent, tiles), tiles.ctas * tiles.consumers * ROWS)
    # Few rows: as many parts as keep the memory busy. Keys that are converted need more. Of 4 bits, 128k keys
    # take 130 us with all multiprocessors, 165 us with 6/8 of them.
    is_nvfp4 = spec.cache is not None and spec.cache.is_nvfp4
    eighths = 8 if is_nvfp4 else 7 if tiles.kv8_stages else 6
    slots = chip.sms * eighths // 8 if tiles.consumers == 1 else chip.sms // tiles.ctas
    return choose_splits(spec, count, extent.max_seqlen_k, tiles.tile_n, slots)


def _lengths_of_tiles_differ(spec: AttentionSpec) -> bool:
    return spec.has_blocks or (spec.window_right is not None and spec.window_left is None)


def _l2_pairs(spec: AttentionSpec, extent: ProblemSize, cfg: ForwardVariant) -> tuple[int, int]:
    """Return the number of (head, sequence) pairs, and bytes of K and V for each."""
    pairs = spec.heads_q // cfg.packed_heads * (1 if cfg.has_packed_order else extent.batch)
    keys = extent.max_seqlen_k * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
    return pairs, max(keys * cfg.packed_heads // spec.group, 1)


def l2_group_of_single(spec: AttentionSpec, extent: ProblemSize, cfg: ForwardVariant, nbytes: int) -> int:
    """Return the size of an L2 group, see `l2_groups`, with one CTA, or pair of CTAs, per tile. nbytes: of K and V."""
    if not _lengths_of_tiles_differ(spec):
        return 1
    pairs, per_pair = _l2_pairs(spec, extent, cfg)
    return -(-pairs // -(-pairs * per_pair // nbytes))


def l2_groups(
    spec: AttentionSpec, extent: ProblemSize, chip: Chip, cfg: ForwardVariant, tiles: ForwardTiles
) -> tuple[int, int]:
    """Return the size of an L2 group, the (head, sequence) pairs that advance together, and the maximum number of
    groups. Longest tiles are first (also for block lists). The size is 1 if all tiles have the same length.

    With one CTA per tile, a group has as many pairs as fit in L2, and groups have equal sizes. A persistent grid runs
    in snake order in whole rounds, so every CTA gets the same share of each group. Its groups are as small as possible,
    so CTAs read new K and V at different times. Only the last group may be larger, within the L2 limit.
    """
    if not cfg.persistent:
        return l2_group_of_single(spec, extent, cfg, int(tiles.l2_share * chip.l2)), MANY
    if not _lengths_of_tiles_differ(spec):
        return 1, MANY
    pairs, per_pair = _l2_pairs(spec, extent, cfg)
    concurrent_tiles = chip.sms // cfg.ctas
    round_trip = 2 * concurrent_tiles
    m_blocks = -(-extent.max_seqlen_q * cfg.packed_heads // cfg.rows)
    l2_group = round_trip // math.gcd(round_trip, m_blocks)
    if tiles.l2_group is not None and tiles.l2_group % l2_group == 0:
        l2_group = tiles.l2_group
    elif tiles.l2_group is not None and round_trip % (m_blocks * tiles.l2_group) == 0:
        return tiles.l2_group, MANY
    l2_group = min(l2_group, pairs)
    if spec.has_blocks or m_blocks == 1:
        return l2_group, MANY
    last = [min(extent.max_seqlen_q, -(-(i + 1) * cfg.rows // cfg.packed_heads)) for i in reversed(range(m_blocks))]
    key_counts = [row + extent.max_seqlen_k - extent.max_seqlen_q for row in last]
    lengths = [max(-(-keys // cfg.tile_n), 0) for keys in key_counts]
    return l2_group, even_l2_groups(
        l2_group, pairs, min(int(LAST_SHARE * chip.l2) // per_pair, pairs), lengths, concurrent_tiles
    )


class Plan(plans.ForwardBackwardPlan):
    """Plan of the forward alone."""

    directions = Sm90Forward, None
