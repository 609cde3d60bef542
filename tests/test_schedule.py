"""The order of tiles: every tile once, a pair's blocks one way, and neighbouring pairs together."""

import random

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.core.order import Order


def test_every_tile_once_and_blocks_of_a_pair_in_order(seed):
    choose = random.Random(seed)
    for _ in range(50):
        blocks, heads, batch = (choose.randint(1, 9) for _ in range(3))
        section, descending = choose.choice([None, 1, heads, choose.randint(1, 100)]), choose.random() < 0.5
        order = Order(blocks, heads, batch, section, descending)
        tiles = [order.at(i) for i in range(order.tiles)]
        assert len(set(tiles)) == len(tiles) == blocks * heads * batch
        for head in range(heads):
            for sequence in range(batch):
                seen = [t.block for t in tiles if (t.head, t.sequence) == (head, sequence)]
                assert seen == list(range(blocks))[:: -1 if descending else 1]


def test_pairs_of_a_section_advance_together_and_sections_follow_each_other():
    tiles = [Order(blocks=3, heads=2, batch=5, section=4).at(i) for i in range(30)]
    pairs = [2 * t.sequence + t.head for t in tiles]
    assert pairs == [0, 1, 2, 3] * 3 + [4, 5, 6, 7] * 3 + [8, 9] * 3
    assert [t.block for t in tiles[:12]] == [0] * 4 + [1] * 4 + [2] * 4


def test_waves_descend_and_the_blocks_of_every_other_ascend():
    order = Order(blocks=7, heads=2, batch=1, section=2, wave=3)
    assert [order.at(i).block for i in range(0, 14, 2)] == [6, 5, 4, 1, 2, 3, 0]
    assert [order.at(i).head for i in range(14)] == [0, 1] * 7


def test_sections_of_one_wave_go_there_and_back():
    order = Order(blocks=3, heads=2, batch=2, section=1, wave=3)
    assert [order.at(i).block for i in range(12)] == [2, 1, 0, 0, 1, 2] * 2
    assert [order.goes_back(order.at(i)) for i in range(12)] == [0, 0, 0, 1, 1, 1] * 2


@pytest.mark.parametrize("wave", [None, 3, 8])
def test_blocks_take_turns_in_the_order_of_work(wave):
    """Whoever waits for a block waits for one whose CTA was launched before."""
    for descending in (False, True):
        order = Order(blocks=8, heads=3, batch=1, section=1, descending=descending, wave=wave)
        for head in range(3):
            tiles = [order.at(8 * head + i) for i in range(8)]
            for first, stop in ((0, 8), (0, 6), (3, 8), (1, 4)):  # those that a block of rows meets
                met = [tile for tile in tiles if first <= tile.block < stop]
                assert [order.turn(tile, first, stop) for tile in met] == list(range(stop - first))


def test_no_section_is_a_section_of_the_heads_of_a_sequence():
    tiles = [Order(blocks=4, heads=3, batch=2).at(i) for i in range(24)]
    assert tiles == [Order(blocks=4, heads=3, batch=2, section=3).at(i) for i in range(24)]
