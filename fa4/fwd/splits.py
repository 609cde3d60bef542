"""How many blocks share the keys of one tile of query rows, when the tiles alone leave the chip idle."""

from __future__ import annotations

from ..spec import AttentionSpec

MOST_SPLITS = 128
# What takes time beside key blocks, counted in them: the start and end of a part, the joining of parts, and of each.
_START, _JOIN, _JOIN_PART = 1, 3, 0.125
_WORTH_IT = 0.875  # the sums above are not so exact
# Parts that do not depend on the batch: keys that are worth one, and how many, for each takes memory.
_FIXED_KEYS, _MOST_FIXED = 512, 16
# Shared memory that CTAs of split keys leave to the blocks that join the parts, which may then start beside them.
JOINING_BYTES = 8 << 10


def choose_splits(spec: AttentionSpec, tiles: int, seqlen_k: int, tile_n: int, slots: int, busy: float = 1.0) -> int:
    """The fewest parts per tile with which `tiles` of them are done earliest; 1 for no split, as where twice as many
    blocks would not run at once.

    slots: blocks that the chip runs at once. busy: share of them from which on more gain nothing: where tiles have so
    few rows that memory is what takes time, fewer blocks keep it busy. spec.num_splits decides if it is given, and with
    spec.batch_invariant the keys that there is room for.
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
    """Key blocks of tile_n that each of `splits` parts of the longest sequence has at most."""
    return -(-seqlen_k // (tile_n * splits))
