"""A call like the one before is told from all others: it takes a way past checks and torch's dispatcher."""

from itertools import pairwise

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fa4
from fa4.runtime.device import chip_by_number, emulating
from fa4.torch_ops import calls
from fa4.torch_ops.signature import routes


def clear():
    for calls_of_a_kind in (routes, calls._dense, calls._packed):
        calls_of_a_kind.clear()


def look(tensors):
    """What one look knows of the fixture's call."""
    return calls._dense.last.find((*tensors, *[None] * 5), (None, True, (None, None), 0.0, None, "auto"))


@pytest.fixture
def qkv(seed):
    """Of a call that has come so often that it is known by one look."""
    clear()
    tensors = [torch.randn(2, 9, 2, 8, generator=torch.Generator().manual_seed(seed + i)) for i in range(3)]
    for _ in range(4):
        fa4.flash_attn_func(*tensors, causal=True)
    assert look(tensors) is not None
    return tensors


CHANGES = {
    "values": lambda q, k, v: dict(q=q + 1),
    "dtype": lambda q, k, v: dict(q=q.half(), k=k.half(), v=v.half()),
    "shape": lambda q, k, v: dict(q=q[:, :5]),
    "strides": lambda q, k, v: dict(q=q.transpose(1, 2).contiguous().transpose(1, 2)),
    "one tensor twice": lambda q, k, v: dict(v=k),
    "scale": lambda q, k, v: dict(softmax_scale=0.5),
    "window": lambda q, k, v: dict(window_size=(2, 2)),
    "softcap": lambda q, k, v: dict(softcap=2.0),
    "sink": lambda q, k, v: dict(learnable_sink=torch.ones(2)),
    "subclass": lambda q, k, v: dict(q=q.as_subclass(torch.nn.Buffer)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_that_differs_gets_its_own_result(qkv, change):
    arguments = dict(zip("qkv", qkv)) | dict(causal=True) | change(*qkv)
    got = fa4.flash_attn_func(**arguments)
    clear()
    assert torch.equal(got, fa4.flash_attn_func(**arguments))


@pytest.mark.parametrize(
    "wrong", [dict(causal=1), dict(softcap=False), dict(window_size=(True, 0)), dict(window_size=(1.0, 0))], ids=str
)
def test_a_wrong_type_is_refused_also_where_it_equals_a_right_value(qkv, wrong):
    right = dict(causal=True, softcap=0.0, window_size=(1, 0))
    for _ in range(4):
        fa4.flash_attn_func(*qkv, **right)
    with pytest.raises((TypeError, ValueError)):
        fa4.flash_attn_func(*qkv, **right | wrong)


def test_gradients_are_asked_for_anew(qkv):
    q, k, v = qkv
    q = q.requires_grad_()
    with torch.no_grad():
        for _ in range(4):
            assert not fa4.flash_attn_func(q, k, v, causal=True).requires_grad
    assert fa4.flash_attn_func(q, k, v, causal=True).requires_grad
    with torch.inference_mode():
        assert fa4.flash_attn_func(q.detach(), k, v, causal=True).is_inference()


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        self.seen.append(function.name())
        return function(*arguments, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, arguments=(), kwargs=None):
        self.seen.append(getattr(function, "_qualified_op_name", "").replace("fa4.", "fa4::"))
        return function(*arguments, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Dispatched, Called], ids=lambda mode: mode.__name__)
def test_a_mode_sees_the_operator(qkv, mode):
    with mode() as watcher:
        fa4.flash_attn_func(*qkv, causal=True)
    assert any(name.startswith("fa4::forward") for name in watcher.seen), watcher.seen


def test_a_profiler_sees_the_operator(qkv):
    with torch.profiler.profile() as profiler:
        fa4.flash_attn_func(*qkv, causal=True)
    assert "fa4::forward" in {event.name for event in profiler.events()}


def test_a_transform_sees_the_operator(qkv):
    q, k, v = qkv
    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(fa4.flash_attn_func(leaf, k, v, causal=True).sin().sum(), leaf)
    got = torch.func.grad(lambda x: fa4.flash_attn_func(x, k, v, causal=True).sin().sum())(q)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("trains", [False, True], ids=["no_grad", "grad"])
def test_a_tensor_that_outlived_its_transform_is_the_tensor(qkv, trains):
    """It has no memory of its own, and a type and dispatch keys like those of a call that is known."""
    q, k, v = qkv
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(q)
    k = k.clone().requires_grad_(trains)
    expected = fa4.flash_attn_func(q, k, v, causal=True)
    for _ in range(4):
        out = fa4.flash_attn_func(kept[0], k, v, causal=True)
        assert torch.equal(out, expected) and out.requires_grad is trains


def test_another_chip_gets_its_own_plan(qkv):
    before = look(qkv)
    with emulating(chip_by_number(80)):
        assert look(qkv) is None
    assert look(qkv) is before


def test_packed_calls_are_told_by_lengths_and_bounds(seed):
    clear()
    q, k, v = (torch.randn(20, 2, 8, generator=torch.Generator().manual_seed(seed + i)) for i in range(3))

    def attend(bounds, **more):
        bounds = torch.tensor(bounds, dtype=torch.int32)
        return fa4.flash_attn_varlen_func(q, k, v, cu_seqlens_q=bounds, cu_seqlens_k=bounds, **more)

    for _ in range(4):
        attend((0, 12, 20), max_seqlen_q=300, max_seqlen_k=300)
    assert calls._packed.last._calls and not calls._dense.last._calls
    for bounds, more in (((0, 5, 20), dict(max_seqlen_q=300, max_seqlen_k=300)), ((0, 3, 9, 20), {}), ((0, 20), {})):
        pieces = [fa4.flash_attn_func(*(x[None, a:b] for x in (q, k, v)))[0] for a, b in pairwise(bounds)]
        torch.testing.assert_close(attend(bounds, **more), torch.cat(pieces))
    with pytest.raises(ValueError, match="max_seqlen_q is 11, expected at least 12"):
        attend((0, 12, 20), max_seqlen_q=11, max_seqlen_k=300)
