"""Block masks of other block sizes, as kernels walk them: the same pairs are seen."""

import itertools

import pytest
import torch

import fa4
from fa4.mods.frontend import coarse
from fa4.mods.frontend.blocks import FULL, NONE, PARTIAL, listed, state_table
from fa4.mods.frontend.trace import trace_mask
from fa4.mods.ir.graph import parse
from fa4.mods.ir.record import Mods
from fa4.mods.ir.tensors import evaluation

ROWS, KEYS = 300, 410


def seen_by(mods: Mods) -> torch.Tensor:
    """(batch, heads, ROWS, KEYS)."""
    table = state_table(mods.blocks[:4], -(-KEYS // mods.block_k))
    state = table.repeat_interleave(mods.block_q, 2).repeat_interleave(mods.block_k, 3)[:, :, :ROWS, :KEYS]
    if not mods.mask:
        return state != NONE
    b, h, row, key = (torch.arange(n) for n in (2, 3, ROWS, KEYS))
    inputs = {"b": b.view(-1, 1, 1, 1), "h": h.view(-1, 1, 1), "q_idx": row[:, None], "kv_idx": key}
    done = evaluation(parse(mods.mask), *mods.mask_values(), inputs, torch.float32)
    return (state == FULL) | ((state == PARTIAL) & done.value(done.graph.result))


@pytest.mark.parametrize("block", [(16, 16), (48, 16), (32, 64), (192, 128), (256, 320), (16, 416)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("mask", [None, fa4.masks.sliding_window(50)], ids=["lists alone", "with a mask_mod"])
def test_the_same_pairs_are_seen(block, heads, mask, seed):
    """Of lists that no mask_mod made: each block is there by chance, whole or not."""
    generator = torch.Generator().manual_seed(seed)
    shape = *heads, -(-ROWS // block[0]), -(-KEYS // block[1])
    table = torch.randint(0, 3, shape, generator=generator, dtype=torch.uint8)
    table[:, :, :9, :9] = FULL
    lists = [*listed(table), *listed(table.transpose(2, 3))]
    traced = None if mask is None else trace_mask(mask)
    text, numbers = ("", []) if traced is None else (traced.graph.text, [float(x) for x in traced.numbers])
    mods = Mods([], lists, "", text, numbers, *block, [])
    assert coarse.needs_tiling(block)
    made = coarse.in_tiles(mods, (ROWS, KEYS))
    assert made.block_q % 128 == 0 and made.block_k % 128 == 0
    assert torch.equal(seen_by(made), seen_by(mods)), f"seed {seed}"
    of_keys = state_table(made.blocks[:4], made.blocks[1].shape[3])
    assert torch.equal(state_table(made.blocks[4:8], made.blocks[5].shape[3]), of_keys.transpose(2, 3))


@pytest.mark.parametrize("block", [(128, 128), (256, 384), (100, 128), (128, 8)], ids=str)
def test_sizes_that_are_left_alone(block):
    assert not coarse.needs_tiling(block)


def test_lists_of_a_table_are_ascending_and_contiguous(seed):
    """Also those of a transposed table: kernels read rows of lists."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 3, (2, 3, 5, 7), generator=generator).to(torch.uint8)
    for of in (table, table.transpose(2, 3), table[..., :0]):
        for (counts, lists), state in zip((listed(of)[:2], listed(of)[2:]), (PARTIAL, FULL)):
            assert counts.is_contiguous() and lists.is_contiguous() and counts.dtype == lists.dtype == torch.int32
            for *place, row in ((*i, of[i]) for i in itertools.product(*map(range, of.shape[:-1]))):
                expected = (row == state).nonzero().flatten().tolist()
                assert counts[tuple(place)] == len(expected), f"seed {seed}"
                rest = [0] * (of.shape[-1] - len(expected))
                assert lists[tuple(place)].tolist() == expected + rest, f"seed {seed}"
