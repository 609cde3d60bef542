"""Traced scores and masks, and block masks, in the kernels of three chips, each on the emulated one."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

import fa4
from fa4.emulator import emulate
from fa4.runtime import jit
from tests.mods.kernels import problems
from tests.mods.oracle import assert_kernel_is_right, sums_of_dq

pytestmark = pytest.mark.rotates(6)

CHIPS = {"sm80": "sm_80", "sm90": "sm_90a", "sm100": "sm_100a"}
# Each shows a part of its chip's kernels. Functions with many operations take half a minute to compile for a chip, and
# what traces them is the same for all: the portable kernels show it, forward and backward.
SOME = {
    # Lists of blocks, of each head its own, are below; documents in lists are the other chips'.
    "sm80": ("many_kinds_in_order", "logarithm_and_angle", "rare_operators"),
    # Steps in order, which keep scores; the same by lists; steps that overlap, by lists of each head of a group; blocks
    # with the longest lists first.
    "sm90": ("few_kinds", "documents", "documents_192_128", "heads_of_group", "heads_wide"),
    # Scores that are kept; by lists; a pair of CTAs, whose order of additions is held. Each head's own lists, and rows
    # of blocks without a key, are walked by code that the others show.
    "sm100": ("few_kinds", "documents", "stripes", "heads_of_group"),
}
# Scores by lists are in "documents", each head's own lists in "heads_wide".
SOME_FORWARD = {"sm80": ("packed_and_split", "other_blocks"), "sm90": ("packed_by_head",), "sm100": ("packed_by_head",)}
# The soak runs these too.
MORE = {
    "sm80": ("documents_short", "heads_of_group_in_order"),
    "sm90": ("logarithm_and_angle", "many_kinds", "divides", "packed_and_split", "heads", "heads_of_group_in_order"),
    "sm100": ("logarithm_and_angle", "many_kinds", "divides", "packed_and_split", "heads", "heads_of_group_in_order"),
}


def listed(table: dict[str, tuple[str, ...]], *marks) -> list:
    return [pytest.param(backend, name, marks=marks) for backend, names in table.items() for name in names]


@pytest.mark.parametrize("backend, name", listed(SOME) + listed(MORE, pytest.mark.soak))
def test_forward_and_gradients(backend, name, seed):
    problem = problems()[name]
    with emulate(CHIPS[backend], seed=seed):
        assert_kernel_is_right(problem, seed, backend)


@pytest.mark.parametrize("backend, name", listed(SOME_FORWARD))
def test_forward(backend, name, seed):
    problem = problems()[name]
    with emulate(CHIPS[backend], sms=8, seed=seed) as gpu:
        assert_kernel_is_right(problem, seed, backend, gradients=False)
    # With so many multiprocessors keys are cut into parts, which a second kernel joins.
    assert len(gpu.launches) == (2 if name.startswith("packed") else 1)


def test_other_values_numbers_lengths_and_lists_compile_nothing(seed):
    far, near = (problems()[name] for name in ("heads_far", "heads_near"))
    with emulate("sm_80", seed=seed):
        assert_kernel_is_right(far, seed, "sm80")
        compiled = set(jit._launchers)
        assert_kernel_is_right(near, seed, "sm80")
    assert set(jit._launchers) == compiled


def test_heads_of_a_group_add_their_blocks_in_order(seed):
    """By lists of their own, on several warps of a CTA."""
    problem = problems()["three_of_group_in_order"]
    with emulate("sm_90a", seed=seed):
        assert_kernel_is_right(problem, seed, "sm90")
    assert len(sums_of_dq(problem, seed, "sm90", "sm_90a", sms=2)) == 1, f"seed {seed}"


def test_blocks_of_keys_add_in_the_order_of_their_numbers(seed):
    assert len(sums_of_dq(problems()["heads_far"], seed, "sm80", "sm_80")) == 1, f"seed {seed}"


def test_the_keys_in_use_may_end_inside_a_full_block(seed):
    """After other full blocks; there the number of keys alone masks."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, n, 1, 64, generator=generator).half() for n in (128, 384, 384))
    mask = fa4.create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx >= 20, 1, 1, 128, 384, device="cpu")
    assert mask.full_kv_num_blocks.item() == 2
    call = dict(block_mask=mask, seqused_k=torch.tensor([300], dtype=torch.int32))
    expected = fa4.flash_attn_func(q.double(), k.double(), v.double(), **call)
    with emulate("sm_100a", seed=seed):
        out = fa4.flash_attn_func(q, k, v, **call)
    assert (out - expected).abs().max() < 2e-3, f"seed {seed}"
