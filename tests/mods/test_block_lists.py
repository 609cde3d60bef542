"""Lists of a block mask may have any order, and may change from call to call."""

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask

import fa4
from fa4.mods.frontend.blocks import LISTS

BLOCK, ROWS = 16, 90  # the last block is cut


def made(lists=None):
    """A block mask with four lists a side, of at least two blocks each."""
    mask = fa4.create_block_mask(fa4.masks.sliding_window(40), None, None, ROWS, ROWS, "cpu", BLOCK)
    if lists is None:
        return mask
    counts, indices, full_counts, full_indices = lists
    return BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, BLOCK_SIZE=BLOCK, mask_mod=mask.mask_mod, seq_lengths=(ROWS, ROWS)
    )


def reversed_lists(mask):
    """The lists of keys, the entries of each from the last to the first."""
    lists = []
    for counts, indices in (
        (mask.kv_num_blocks, mask.kv_indices),
        (mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        place = torch.arange(indices.shape[-1]).expand(indices.shape)
        back = torch.where(place < counts[..., None], counts[..., None] - 1 - place, place)
        lists += [counts.clone(), indices.gather(-1, back.long())]
    return lists


def results(mask, seed, **options):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(2, ROWS, 2, 8, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = fa4.flash_attn_func(*leaves, block_mask=mask, **options)
    return [out, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_lists_in_another_order_are_the_same_mask(deterministic, seed):
    mask = made()
    other = made(reversed_lists(mask))
    assert not torch.equal(mask.kv_indices, other.kv_indices)
    for _ in range(3):
        for a, b in zip(results(mask, seed), results(other, seed, deterministic=deterministic)):
            assert torch.equal(a, b)


def test_compiled_code_takes_lists_in_another_order(seed):
    mask = made()
    other = made(reversed_lists(mask))
    q = torch.randn(2, ROWS, 2, 8, generator=torch.Generator().manual_seed(seed))
    compiled = torch.compile(lambda q: fa4.flash_attn_func(q, q, q, block_mask=other), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q), fa4.flash_attn_func(q, q, q, block_mask=mask))


def test_lists_that_change_in_place_are_seen_by_the_next_call(seed):
    """A known call has lists of its own, made of the caller's."""
    mask, fewer = made(), made()
    for _ in range(4):
        before = results(mask, seed)[0]
    for name in ("full_kv_num_blocks", "full_q_num_blocks"):
        getattr(mask, name).zero_()
        setattr(fewer, name, torch.zeros_like(getattr(fewer, name)))
    after = results(mask, seed)
    assert not torch.equal(before, after[0])
    assert all(map(torch.equal, after, results(fewer, seed)))


@pytest.mark.parametrize("name", LISTS)
def test_lists_that_change_before_the_backward_are_an_error(name, seed):
    mask = made()
    q = torch.randn(2, ROWS, 2, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    for _ in range(3):
        out = fa4.flash_attn_func(q, q, q, block_mask=mask)
    getattr(mask, name).add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_block_mask_that_comes_again_is_known_by_one_look(seed, monkeypatch):
    """Lists are sorted once, also those whose blocks kernels do not walk, and those without the side of queries."""
    from fa4.mods.frontend import blocks

    calls = []
    own = blocks.block_lists
    monkeypatch.setattr(blocks, "block_lists", lambda *given, **options: calls.append(1) or own(*given, **options))
    only_keys = made()
    only_keys.q_num_blocks = only_keys.q_indices = only_keys.full_q_num_blocks = only_keys.full_q_indices = None
    for mask in (made(), only_keys):
        calls.clear()
        for _ in range(5):
            results(mask, seed)
        assert len(calls) == 1
