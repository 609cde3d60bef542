"""What attention-gym publishes, on the torch backend, against torch's flex_attention in float64."""

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

import fa4
from fa4.mods.trace import ModError

from .programs import torchs_answer
from .published import HEADS, LENGTH, SCORES, latent_attention, make_masks
from .test_flex import assert_same, gradients

MASKS = make_masks()


def problem(seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(1, HEADS, LENGTH, 8, dtype=torch.float64, generator=generator) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], dout


@pytest.mark.parametrize("name", MASKS)
def test_masks(name, seed):
    """One for both heads, as whole and partial blocks; some are more rows of a block than a tile of ours."""
    leaves, dout = problem(seed)
    ours, theirs = (
        create(MASKS[name], None, None, LENGTH, LENGTH, BLOCK_SIZE=16, device="cpu")
        for create in (fa4.create_block_mask, torchs.create_block_mask)
    )
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    results = []
    for attend in (
        lambda: fa4.flex_attention(*leaves, None, ours, return_lse=True),
        lambda: torchs_answer(*leaves, mask_mod=MASKS[name]),
    ):
        out, lse = attend()
        results.append((out, lse, *gradients(out, lse, leaves, dout)))
    assert_same(*results, f"{name}, seed {seed}")


@pytest.mark.parametrize("name", SCORES)
def test_scores(name, seed):
    leaves, dout = problem(seed)
    results = []
    for attend in (
        lambda: fa4.flex_attention(*leaves, SCORES[name], return_lse=True),
        lambda: torchs_answer(*leaves, SCORES[name]),
    ):
        out, lse = attend()
        results.append((out, lse, *gradients(out, lse, leaves, dout)))
    assert_same(*results, f"{name}, seed {seed}")


def test_products_of_rows_are_refused():
    (q, k, v), _ = problem(0)
    with pytest.raises(ModError, match="expected it indexed down to a number"):
        fa4.flex_attention(q, k, v, latent_attention(q.detach(), k.detach()))
