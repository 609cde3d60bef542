"""Score functions with masks: derivatives at pairs that a mask hides, and of rows and keys that do not exist, reach no
gradient, though they may be infinite or NaN. The derivative of a softcap, 1 - tanh^2, with each kind of mask."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

import fa4
from fa4.emulator import emulate
from tests.mods.kernels import by_head, stripes
from tests.mods.oracle import Problem, assert_kernel_is_right

pytestmark = pytest.mark.rotates(4)

CHIPS = {"sm80": "sm_80", "sm90": "sm_90a", "sm100": "sm_100a"}


def prefix(b, h, q_idx, kv_idx):
    """Rows of a block that see nothing, keys that nobody sees."""
    return (kv_idx < 40) & (q_idx >= 3)


def under_a_softcap(name, mask_mod, queries, keys, blocks=False, causal=False, **shape):
    call = dict(softcap=3.0, causal=causal)
    if blocks:
        call["block_mask"] = fa4.create_block_mask(mask_mod, 1, None, queries, keys, device="cpu")
    return Problem(name, queries, keys, mask_mod=mask_mod, call=call, **shape)


def infinite_derivatives(**shape):
    """By the distance, which is 0 where the mask hides; infinite factors at hidden pairs; and by how far the last row
    is, which is 0 in the first one that does not exist. Gradients of the factors, too."""
    queries = keys = 75
    factors = torch.rand(keys) + 0.5
    factors[10] = torch.inf
    scales = torch.rand(2).add(0.5).requires_grad_()
    rows_left = torch.full((1,), float(queries))

    def hidden(q_idx, kv_idx):
        return (q_idx == kv_idx) | (kv_idx == 10)

    def score_mod(score, b, h, q_idx, kv_idx):
        weight = scales[h] * factors[kv_idx] / (q_idx - kv_idx)
        return score * weight + score / (rows_left[0] - q_idx)

    def same_where_seen(score, b, h, q_idx, kv_idx):
        is_hidden = hidden(q_idx, kv_idx)
        weight = torch.where(is_hidden, 0.0, scales[h] * torch.where(kv_idx == 10, 1.0, factors[kv_idx]))
        weight = weight / torch.where(is_hidden, 1, q_idx - kv_idx)
        return score * weight + score / (rows_left[0] - q_idx)

    return Problem(
        "infinite_derivatives",
        queries,
        keys,
        score_mod=score_mod,
        same_where_seen=same_where_seen,
        mask_mod=lambda b, h, q_idx, kv_idx: ~hidden(q_idx, kv_idx),
        trained=(scales,),
        call=dict(causal=True, deterministic=True),
        **shape,
    )


PROBLEMS = {
    "prefix_64": under_a_softcap("prefix", prefix, 128, 128, head_dim=64),
    "prefix_128": under_a_softcap("prefix", prefix, 70, 150, head_dim=128, heads=4, causal=True),
    "stripes_192_128": under_a_softcap("stripes", stripes, 70, 150, head_dim=192, head_dim_v=128),
    # A mask_mod is asked for some of the blocks, and keys end in a block that is called whole.
    "lists_128": under_a_softcap("lists", by_head(200), 260, 300, blocks=True, head_dim=128),
    "lists_192_128": under_a_softcap("lists", by_head(200), 260, 300, blocks=True, head_dim=192, head_dim_v=128),
    "prefix_96": under_a_softcap("prefix", prefix, 70, 150, head_dim=96),
    "prefix_256": under_a_softcap("prefix", prefix, 70, 150, head_dim=256),
    "infinite_derivatives": infinite_derivatives(),
    "infinite_derivatives_128": infinite_derivatives(head_dim=128),
}
SOME = {
    "sm80": ("prefix_256", "infinite_derivatives"),
    "sm90": ("prefix_128", "lists_192_128", "infinite_derivatives"),
    "sm100": ("lists_128", "infinite_derivatives"),
}
CASES = [
    pytest.param(backend, name, marks=() if name in SOME[backend] else pytest.mark.soak)
    for backend in CHIPS
    for name in PROBLEMS
    if backend == "sm80" or not name.endswith("_256")  # where a chip has no kernel of its own for it
]


@pytest.mark.parametrize("backend, name", CASES)
def test_no_derivative_of_a_hidden_pair_reaches_a_gradient(backend, name, seed):
    with emulate(CHIPS[backend], seed=seed):
        assert_kernel_is_right(PROBLEMS[name], seed, backend)


@pytest.mark.parametrize("name", PROBLEMS)
def test_nor_in_torch(name, seed):
    assert_kernel_is_right(PROBLEMS[name], seed, "torch")
