"""Calls that equal an earlier one but for what has changed meanwhile: a mode of torch, a list in place, a thread."""

import contextlib

import pytest
import torch

import fa4
from fa4 import fallback, scores


@contextlib.contextmanager
def deterministic_algorithms(mode):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.fixture
def plans(monkeypatch):
    """The plans whose backward ran."""
    ran = []
    backward = fallback.Plan.backward
    monkeypatch.setattr(fallback.Plan, "backward", lambda plan, *given: ran.append(plan) or backward(plan, *given))
    return ran


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("trains", ["q", "captured"])
def test_deterministic_algorithms_are_asked_for_anew(plans, trains, first, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 5, 2, 8, generator=generator) for _ in range(3))
    table = torch.randn(2, 9, generator=generator).requires_grad_(trains == "captured")
    score_mod, q = scores.relative_bias(table), q.requires_grad_(trains == "q")
    for mode in (first, not first, first):
        for _ in range(3):
            with deterministic_algorithms(mode):
                out = fa4.flash_attn_func(q, k, v, score_mod=score_mod)
            torch.autograd.grad(out.sum(), table if trains == "captured" else q)
            assert plans[-1].spec.deterministic is mode


@pytest.fixture
def masked(seed):
    """A call with a block mask whose lists are kept, its leaf and those lists."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 256, 1, 8, generator=generator) for _ in range(3))
    mask = fa4.create_block_mask(fa4.masks.sliding_window(100), None, None, 256, 256, device="cpu")
    q.requires_grad_()
    return lambda: fa4.flash_attn_func(q, k, v, block_mask=mask), q, mask


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("name", ["kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"])
def test_a_list_of_blocks_that_changes_before_the_backward_is_an_error(masked, name, times):
    """As any tensor is that autograd saved: gradients of other blocks than the forward's would be silently wrong."""
    attend, q, mask = masked
    for _ in range(times):
        out = attend()
    getattr(mask, name).add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), q)


def test_hooks_of_saved_tensors_see_lists_of_blocks(masked):
    attend, q, mask = masked
    lists = {getattr(mask, name).data_ptr() for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices")}
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x.clone(), lambda x: x):
        out = attend()
    assert lists <= {x.data_ptr() for x in packed}
    expected = torch.autograd.grad(attend().sum(), q)
    assert torch.equal(*torch.autograd.grad(out.sum(), q), *expected)
