"""How many blocks share the keys of one tile of query rows, when the tiles alone leave the chip idle."""

from __future__ import annotations

from ..spec import AttentionSpec

_FEWEST_BLOCKS = 4  # key blocks that a part must have to be worth its own output and the joining
_MOST = 128


def choose_splits(spec: AttentionSpec, tiles: int, seqlen_k: int, tile_n: int, slots: int) -> int:
    """Parts per tile so that `tiles` of them fill `slots` (blocks that the chip runs at once); 1 for no split."""
    keys = seqlen_k
    if spec.window_left is not None:
        right = seqlen_k if spec.window_right is None else spec.window_right
        keys = min(keys, spec.window_left + right + tile_n)
    if tiles == 0 or 2 * tiles > slots:
        return 1
    return max(1, min(slots // tiles, -(-keys // tile_n) // _FEWEST_BLOCKS, _MOST))
