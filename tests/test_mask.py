"""Blocks of the mask against the mask itself, drawn in full: random lengths, windows, tiles and groups."""

import random

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.core.mask import Band


def _problem(choose: random.Random) -> tuple[Band, torch.Tensor]:
    """A mask and what it hides: (group * seqlen_q rows, seqlen_k keys), True where visible."""
    seqlen_q, seqlen_k = choose.randint(1, 60), choose.randint(1, 60)
    left, right = (choose.choice([None, 0, choose.randint(0, 70)]) for _ in range(2))
    if choose.random() < 0.2:
        left, right = choose.choice([None, choose.randint(70, 140)]), -choose.randint(1, 70)
    mask = Band(
        tile_m=choose.choice([4, 8, 16]),
        tile_n=choose.choice([4, 8, 16]),
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        left=left,
        right=right,
        group=choose.choice([1, 1, 2, 3, 4]),
    )
    distance = torch.arange(seqlen_k)[None, :] - (torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return mask, visible.repeat_interleave(mask.group, dim=0)


def _tile(mask: Band, visible: torch.Tensor, m: int, n: int) -> torch.Tensor:
    return visible[m * mask.tile_m : (m + 1) * mask.tile_m, n * mask.tile_n : (n + 1) * mask.tile_n]


def test_blocks_hold_all_that_is_visible_and_whole_blocks_nothing_hidden(seed):
    choose = random.Random(seed)
    for _ in range(200):
        mask, visible = _problem(choose)
        m_blocks = -(-visible.shape[0] // mask.tile_m)
        n_blocks = -(-visible.shape[1] // mask.tile_n)
        touched = {(m, n) for m in range(m_blocks) for n in range(n_blocks) if _tile(mask, visible, m, n).any()}
        by_keys, by_queries = set(), set()
        for m in range(m_blocks):
            blocks = mask.key_blocks(m)
            by_keys |= {(m, n) for n in range(blocks.first, blocks.stop)}
            assert blocks.first <= blocks.full_first <= blocks.full_stop <= blocks.stop
            for n in range(blocks.first, blocks.stop):
                tile = _tile(mask, visible, m, n)
                whole = bool(tile.all()) and tile.shape[1] == mask.tile_n
                if blocks.full_first <= n < blocks.full_stop:
                    assert whole, (mask, m, n)
                elif (m + 1) * mask.tile_m <= visible.shape[0]:
                    assert not whole, (mask, m, n)  # it would be masked element by element
                assert bool(mask.needs_mask(m, n)) >= (not whole), (mask, m, n)
        for n in range(n_blocks):
            first, stop = mask.query_blocks(n)
            by_queries |= {(m, n) for m in range(first, stop)}
        # Both directions name exactly the same tiles: the backward's turns count on it.
        assert by_keys == touched, mask
        assert by_queries == touched, mask


def test_shares_of_the_keys_are_disjoint_and_complete(seed):
    choose = random.Random(seed)
    for _ in range(100):
        mask, visible = _problem(choose)
        for m in range(-(-visible.shape[0] // mask.tile_m)):
            whole, count = mask.key_blocks(m), choose.randint(1, 9)
            parts = [whole.part(i, count) for i in range(count)]
            assert [n for p in parts for n in range(p.first, p.stop)] == list(range(whole.first, whole.stop))
            full = [n for p in parts for n in range(p.full_first, p.full_stop)]
            assert full == list(range(whole.full_first, whole.full_stop))
            for p in parts:
                assert p.first <= p.full_first <= p.full_stop <= p.stop
