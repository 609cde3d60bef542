"""The order of tiles: every tile once, a pair's blocks one way, and neighbouring pairs together."""

import random

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.core.order import Order, PackedOrder, tile_order
from fa4.fwd.l2_groups import even_l2_groups


def test_every_tile_once_and_blocks_of_a_pair_in_order(seed):
    choose = random.Random(seed)
    for _ in range(50):
        blocks, heads, batch = (choose.randint(1, 9) for _ in range(3))
        l2_group, descending = choose.choice([None, 1, heads, choose.randint(1, 100)]), choose.random() < 0.5
        most = choose.choice([None, choose.randint(1, 5)]) if l2_group else None
        order = Order(blocks, heads, batch, l2_group, descending, most_l2_groups=most)
        tiles = [order.at(i) for i in range(order.tiles)]
        assert len(set(tiles)) == len(tiles) == blocks * heads * batch
        for head in range(heads):
            for sequence in range(batch):
                seen = [t.block for t in tiles if (t.head, t.sequence) == (head, sequence)]
                assert seen == list(range(blocks))[:: -1 if descending else 1]


def test_pairs_of_a_section_advance_together_and_sections_follow_each_other():
    tiles = [Order(blocks=3, heads=2, batch=5, l2_group=4).at(i) for i in range(30)]
    pairs = [2 * t.sequence + t.head for t in tiles]
    assert pairs == [0, 1, 2, 3] * 3 + [4, 5, 6, 7] * 3 + [8, 9] * 3
    assert [t.block for t in tiles[:12]] == [0] * 4 + [1] * 4 + [2] * 4


def test_the_last_section_has_the_pairs_that_are_left():
    tiles = [Order(blocks=3, heads=2, batch=5, l2_group=4, most_l2_groups=2).at(i) for i in range(30)]
    pairs = [2 * t.sequence + t.head for t in tiles]
    assert pairs == [0, 1, 2, 3] * 3 + [4, 5, 6, 7, 8, 9] * 3
    assert [t.block for t in tiles[12:]] == [0] * 6 + [1] * 6 + [2] * 6


@pytest.mark.parametrize(
    ("pairs", "blocks", "l2_groups"),
    [(512, 8, 13), (256, 8, 7), (264, 8, 8), (336, 8, 9), (20, 8, 1), (64, 32, 2)],
    ids=["more_in_the_last", "a_section_more_in_the_last", "whole_rounds", "few_left_over", "one", "even_as_it_is"],
)
def test_what_is_left_over_is_shared_evenly(pairs, blocks, l2_groups):
    """On 132 CTAs that go to and fro, causal tiles, sections of 33 pairs or all, which are whole rounds."""
    assert even_l2_groups(min(33, pairs), pairs, min(132, pairs), range(blocks, 0, -1), 132) == l2_groups


def test_waves_descend_and_the_blocks_of_every_other_ascend():
    order = Order(blocks=7, heads=2, batch=1, l2_group=2, wave=3)
    assert [order.at(i).block for i in range(0, 14, 2)] == [6, 5, 4, 1, 2, 3, 0]
    assert [order.at(i).head for i in range(14)] == [0, 1] * 7


def test_sections_of_one_wave_go_there_and_back():
    order = Order(blocks=3, heads=2, batch=2, l2_group=1, wave=3)
    assert [order.at(i).block for i in range(12)] == [2, 1, 0, 0, 1, 2] * 2
    assert [order.starts_at_last_row(order.at(i)) for i in range(12)] == [0, 0, 0, 1, 1, 1] * 2


@pytest.mark.parametrize("wave", [None, 3, 8])
def test_blocks_take_turns_in_the_order_of_work(wave):
    """Whoever waits for a block waits for one whose CTA was launched before."""
    for descending in (False, True):
        order = Order(blocks=8, heads=3, batch=1, l2_group=1, descending=descending, wave=wave)
        for head in range(3):
            tiles = [order.at(8 * head + i) for i in range(8)]
            for first, stop in ((0, 8), (0, 6), (3, 8), (1, 4)):  # those that a block of rows meets
                met = [tile for tile in tiles if first <= tile.block < stop]
                assert [order.order_index(tile, first, stop) for tile in met] == list(range(stop - first))


def test_no_section_is_a_section_of_the_heads_of_a_sequence():
    tiles = [Order(blocks=4, heads=3, batch=2).at(i) for i in range(24)]
    assert tiles == [Order(blocks=4, heads=3, batch=2, l2_group=3).at(i) for i in range(24)]


def test_cumulative_lengths_make_a_packed_order():
    """Two tile rows per row: 5 rows fill 3 tiles of 4."""
    dense = tile_order(4, 2, 5, 100, None, 3, 7, 2, descending=True, cluster=2, wave=8, most_l2_groups=6)
    assert dense == Order(3, 3, 7, 2, True, 2, 8, most_l2_groups=6)
    bounds = object()
    assert tile_order(4, 2, 5, 100, bounds, 3, 7, 2, descending=True, cluster=2) == PackedOrder(
        4, 2, bounds, 100, 3, 2, True, 2
    )
    assert tile_order(4, 2, 5, 100, bounds, 3, 7).l2_group is None
