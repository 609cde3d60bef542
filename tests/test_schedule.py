"""The order of tiles: every tile once, and a block never before an earlier block of the same pair."""

import random

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.core.schedule import Tile


def test_every_tile_once_and_blocks_of_a_pair_in_order(seed):
    choose = random.Random(seed)
    for _ in range(50):
        blocks, heads, batch = (choose.randint(1, 9) for _ in range(3))
        section = choose.randint(1, 100)
        tiles = [Tile.of(i, blocks, heads, batch, section) for i in range(blocks * heads * batch)]
        assert len(set(tiles)) == len(tiles)
        for head in range(heads):
            for sequence in range(batch):
                seen = [t.block for t in tiles if (t.head, t.sequence) == (head, sequence)]
                assert seen == list(range(blocks))
