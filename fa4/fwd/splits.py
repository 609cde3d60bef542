"""How many blocks share the keys of one tile of query rows, when the tiles alone leave the chip idle."""

from __future__ import annotations

from ..spec import AttentionSpec

MOST_SPLITS = 128
# What takes time beside key blocks, counted in them: the start and end of a part, the joining of parts, and of each.
_START, _JOIN, _JOIN_PART = 1, 3, 0.125


def choose_splits(spec: AttentionSpec, tiles: int, seqlen_k: int, tile_n: int, slots: int, busy: float = 1.0) -> int:
    """The fewest parts per tile with which `tiles` of them are done earliest; 1 for no split.

    slots: blocks that the chip runs at once. busy: share of them from which on more gain nothing: where tiles have so
    few rows that memory is what takes time, fewer blocks keep it busy.
    """
    keys = seqlen_k
    if spec.window_left is not None:
        right = seqlen_k if spec.window_right is None else spec.window_right
        keys = min(keys, spec.window_left + right + tile_n)
    blocks = -(-keys // tile_n)
    least = tiles * blocks / (slots * busy)

    def time(splits: int) -> float:
        rounds = -(-tiles * splits // slots)
        joining = _JOIN + _JOIN_PART * splits if splits > 1 else 0
        return max(rounds * (-(-blocks // splits) + _START), least) + joining

    return min(range(1, max(min(blocks, MOST_SPLITS), 1) + 1), key=time)
