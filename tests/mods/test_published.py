"""What attention-gym publishes: on the torch backend against torch's flex_attention in float64, and in the kernels."""

import functools

import pytest
import torch
from torch.nn.attention import flex_attention as torchs

pytest.importorskip("attn_gym", reason="attn-gym is among the packages for development")

import fa4

from . import published
from .oracle import assert_kernel_is_right
from .programs import torchs_answer
from .published import HEADS, NAMES
from .test_flex import assert_same, gradients


@functools.cache
def cases() -> dict[str, published.Published]:
    return published.make(dtype=torch.float64)


def test_every_one_is_asked():
    assert tuple(cases()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_as_torchs_flex_attention(name, seed):
    """In float64, with gradients of what scores captured. Masks are one for both heads, as whole and partial blocks;
    some are more rows of a block than a tile of ours."""
    case, generator = cases()[name], torch.Generator().manual_seed(seed)
    queries, keys = case.sizes
    q, k, v, dout = (
        torch.randn(1, HEADS, rows, 8, dtype=torch.float64, generator=generator)
        for rows in (queries, keys, keys, queries)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ours, theirs = (case.by_blocks(create, "cpu", 16) for create in (fa4.create_block_mask, torchs.create_block_mask))
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    results = []
    for attend in (
        lambda: fa4.flex_attention(*leaves, case.score_mod, ours, return_lse=True),
        lambda: torchs_answer(*leaves, case.score_mod, case.mask_mod or fa4.masks.causal),
    ):
        out, lse = attend()
        results.append((out, lse, *gradients(out, lse, [*leaves, *case.trained], dout)))
    assert_same(*results, f"{name}, seed {seed}")


CHIPS = {"sm80": "sm_80", "sm90": "sm_90a", "sm100": "sm_100a"}
IN_SHORT = (("sm80", "mla_rope"),)  # rows of captured numbers; the soak runs all


@pytest.mark.parametrize(
    "backend, name",
    [
        pytest.param(backend, name, marks=() if (backend, name) in IN_SHORT else pytest.mark.soak)
        for backend in CHIPS
        for name in NAMES
    ],
)
def test_kernels(backend, name, seed):
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")
    from fa4.emulator import emulate

    with emulate(CHIPS[backend], seed=seed):
        assert_kernel_is_right(published.problems()[name], seed, backend)
