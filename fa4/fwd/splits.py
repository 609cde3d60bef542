"""Number of splits for split-KV: CTAs that share the keys of a work tile if there are too few tiles for the chip."""

from __future__ import annotations

from ..runtime.spec import AttentionSpec

MOST_SPLITS = 128
# Costs in units of one key block: start and end of a part, the combine kernel, and the combine kernel per part.
_START, _JOIN, _JOIN_PART = 1, 3, 0.125
_WORTH_IT = 0.875  # split only below this share of the estimated time: the cost model is not exact
# batch_invariant: keys per part, and the largest number of parts (each part takes memory).
_FIXED_KEYS, _MOST_FIXED = 512, 16
# Shared memory that split-KV CTAs leave free, so that CTAs of the combine kernel can start next to them.
JOINING_BYTES = 8 << 10


def choose_splits(spec: AttentionSpec, tiles: int, seqlen_k: int, tile_n: int, slots: int, busy: float = 1.0) -> int:
    """Return the smallest number of parts per tile with the shortest estimated time; 1 means no split.

    The result is 1 if two parts per tile would not be resident at once. If spec.num_splits is given, it decides. With
    spec.batch_invariant, only seqlen_k decides.

    slots: resident CTAs of the chip. busy: share of `slots` beyond which more CTAs gain nothing: few CTAs
    saturate the memory bandwidth if tiles have few rows.
    """
    if spec.num_splits:
        return min(spec.num_splits, MOST_SPLITS)
    if spec.batch_invariant:
        return max(1, min(seqlen_k // _FIXED_KEYS, _MOST_FIXED))
    keys = seqlen_k
    if spec.window_left is not None:
        right = seqlen_k if spec.window_right is None else spec.window_right
        keys = min(keys, spec.window_left + right + tile_n)
    blocks = -(-keys // tile_n)
    least = tiles * blocks / (slots * busy)

    def time(splits: int) -> float:
        joining = _JOIN + _JOIN_PART * splits if splits > 1 else 0
        return max(-(-blocks // splits) + _START, least) + joining

    most = min(slots // max(tiles, 1), blocks, MOST_SPLITS)
    splits = min(range(1, max(most, 1) + 1), key=time)
    return splits if time(splits) < _WORTH_IT * time(1) else 1


def blocks_of_part(seqlen_k: int, tile_n: int, splits: int) -> int:
    """Key blocks (of tile_n keys) per part: `splits` parts cover the longest sequence."""
    return -(-seqlen_k // (tile_n * splits))
