"""L2 groups: how many (head, sequence) pairs advance together, so that their K and V stay in L2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..runtime.device import Chip
from ..runtime.spec import AttentionSpec, ProblemSize
from .plan import LaunchSizes
from .variant import ForwardVariant

MANY = LaunchSizes._field_defaults["most_l2_groups"]
# Share of L2 for K and V of a larger last L2 group. On an H100, 62 MB are 1.4 % slower than 32 MB (d128, 2k keys).
LAST_SHARE = 0.64
EVEN = 0.006  # of the average work per CTA: accepted excess of the busiest CTA


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


def l2_groups(spec: AttentionSpec, extent: ProblemSize, chip: Chip, cfg: ForwardVariant, tiles: Any) -> tuple[int, int]:
    """Return the size of an L2 group, the (head, sequence) pairs that advance together, and the maximum number of
    groups. tiles: has `l2_share` and `l2_group`. Longest tiles are first (also for block lists). The size is 1 if all
    tiles have the same length.

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


def even_l2_group(fit: int, pairs: int) -> int:
    """Return the pairs per L2 group if `fit` pairs fit: a divisor of `pairs` in (fit / 2, fit], else `fit`. A small
    last group would start long tiles, fewer than the chip runs at a time, when no other work is left."""
    fit = max(1, min(fit, pairs))
    return next((size for size in range(fit, fit // 2, -1) if pairs % size == 0), fit)


def even_l2_groups(l2_group: int, pairs: int, largest: int, lengths: Sequence[int], ctas: int) -> int:
    """Return the number of L2 groups for a grid of `ctas` CTAs that takes tiles in snake order, if a group is whole
    rounds. largest: maximum pairs of the last group. lengths: lengths of a pair's tiles, in launch order.

    The pairs left over after whole groups may give CTAs uneven work, e.g. half a round of the longest and shortest
    tiles. The last group then gets more whole groups of pairs, as many as make the work even.
    """
    left_over, total = pairs % l2_group, -(-pairs // l2_group)
    if left_over == 0:
        return total
    enough = EVEN * pairs * sum(lengths) / ctas
    least, found = math.inf, total
    for merged in range(max((largest - left_over) // l2_group, 0) + 1):
        unevenness = _unevenness(left_over + merged * l2_group, lengths, ctas)
        if unevenness < least:
            least, found = unevenness, total - merged
        if least < enough:
            break
    return found


def _unevenness(pairs: int, lengths: Sequence[int], ctas: int) -> float:
    """Work of the busiest CTA minus the average, in snake order."""
    work = [0] * ctas
    for i in range(pairs * len(lengths)):
        lap, cta = divmod(i, ctas)
        work[ctas - 1 - cta if lap % 2 else cta] += lengths[i // pairs]
    return max(work) - sum(work) / ctas
