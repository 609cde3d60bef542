"""Private entry points of torch: calls are right without each of them, and where one answers otherwise."""

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import fa4
from fa4.integrations.sdpa import operators
from fa4.runtime import memory, torch_internals
from fa4.torch_ops import autograd, calls, ops, signature
from fa4.torch_ops.run import prepare
from fa4.torch_ops.signature import routes


def unexpected(*_, **__):
    raise TypeError("unexpected keyword argument")


def _without(name, value, *modules):
    """Set in all modules that hold it."""

    def replace(monkeypatch):
        for module in (torch_internals, *modules):
            monkeypatch.setattr(module, name, value)

    return replace


def _without_bypass(monkeypatch):
    monkeypatch.setattr(autograd, "_apply", autograd._Attention.apply)


CHANGES = {
    "profiler": _without("profiler_enabled", torch_internals._yes),
    "tracing": _without("tracing", torch.jit.is_tracing),
    "function_mode": _without("in_function_mode", torch_internals._yes),
    "dispatch_mode": _without("dispatch_modes", torch_internals._yes),
    "transform": _without("transform", None),
    "deterministic": _without("deterministic_algorithms", torch.are_deterministic_algorithms_enabled),
    "autocast": _without("autocast_anywhere", torch_internals._yes, fa4.api.dense),
    "device": _without("current_cuda_device", torch.cuda.current_device, prepare),
    "tangents": _without("may_carry_tangents", lambda: True, signature),
    "wrappers": _without("unwrap_dead_wrappers", torch_internals._through_a_view, calls),
    "attention": _without("scaled_dot_product_attention", None),
    "views": _without("reinterpret_tensor", torch.as_strided, operators),
    "allocation": _without("guards", None, memory),
    "no_guards": _without("tensor_guards", None),
    "other_guards": _without("tensor_guards", unexpected),
    "fake": _without("FAKE", None),
    "constants": _without("is_constant", lambda number: True, ops),
    "apply": _without_bypass,
}


def _all(monkeypatch):
    for change in CHANGES.values():
        change(monkeypatch)


@pytest.fixture(params=[*CHANGES.values(), _all], ids=[*CHANGES, "all"])
def changed(request, monkeypatch):
    monkeypatch.setattr(calls, "_sdpa", calls._sdpa)
    if request.param in (CHANGES["attention"], _all):
        monkeypatch.setattr(calls, "_sdpa", None)
    for kind in (routes, calls._dense, calls._packed):
        kind.clear()
    request.param(monkeypatch)


def tensors(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]


def torch_s(q, k, v):
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def test_calls_and_their_gradients(changed, seed):
    q, k, v = tensors(seed, 2, 9, 2, 8)
    expected = torch_s(q, k, v)
    grads = torch.autograd.grad(expected.sum(), (q, k, v))
    bounds = torch.tensor([0, 9, 18], dtype=torch.int32)
    table = torch.zeros(2, 3).requires_grad_()
    for _ in range(4):
        out = fa4.flash_attn_func(q, k, v, causal=True)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), grads)
        with torch.no_grad():
            torch.testing.assert_close(fa4.flash_attn_func(q, k, v, causal=True), expected)
            flat = (x.flatten(0, 1) for x in (q, k, v))
            packed = fa4.flash_attn_varlen_func(*flat, cu_seqlens_q=bounds, cu_seqlens_k=bounds, causal=True)
            torch.testing.assert_close(packed.view_as(expected), expected)
            cached = fa4.flash_attn_with_kvcache(q, k, v, causal=True)
            torch.testing.assert_close(cached, expected)
        biased = fa4.flash_attn_func(q, k, v, causal=True, score_mod=fa4.scores.relative_bias(table))
        torch.testing.assert_close(biased, expected)
        assert torch.autograd.grad(biased.sum(), table)[0].shape == table.shape


def test_calls_that_somebody_has_to_see(changed, seed):
    q, k, v = tensors(seed, 2, 9, 2, 8)
    expected = torch_s(q, k, v)
    (dq,) = torch.autograd.grad(expected.sum(), q)
    with FlopCounterMode(display=False) as counter:
        fa4.flash_attn_func(q, k, v, causal=True)
    assert counter.get_total_flops() > 0
    kept = []
    got = torch.func.grad(lambda x: kept.append(x) or fa4.flash_attn_func(x, k, v, causal=True).sum())(q)
    torch.testing.assert_close(got, dq)
    for _ in range(3):
        torch.testing.assert_close(fa4.flash_attn_func(kept[0], k, v, causal=True), expected)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="q carries a tangent"):
        fa4.flash_attn_func(torch.autograd.forward_ad.make_dual(q, q), k, v)


def test_operators_of_torch(changed, seed):
    q, k, v = (x.detach().transpose(1, 2) for x in tensors(seed, 2, 9, 2, 8))
    expected = F.scaled_dot_product_attention(q, k, v)
    for _ in range(3):
        out, *_ = operators._sdpa_forward(q, k, v)
        torch.testing.assert_close(out, expected)


def test_an_entry_point_counts_if_it_answers_as_expected():
    asked = torch_internals.entry("is_grad_enabled", None, lambda found: isinstance(found(), bool))
    assert asked is torch.is_grad_enabled
    for path, question in (("_C.no_such_name", callable), ("is_grad_enabled", unexpected), ("pi", callable)):
        assert torch_internals.entry(path, "fallback", question) == "fallback"


def test_every_entry_point_is_there_in_this_torch():
    """Else calls are slower than they could be: a torch that this fails for has new names for them."""
    assert torch_internals.transform is not None and torch_internals.tensor_guards is not None
    assert torch_internals.profiler_enabled is torch._C._autograd._profiler_enabled
    assert torch_internals.in_function_mode is torch._C._is_torch_function_mode_enabled
    assert torch_internals.dispatch_modes is torch._C._len_torch_dispatch_stack
    assert torch_internals.reinterpret_tensor is torch._C._dynamo.guards._reinterpret_tensor
    assert torch_internals.unwrap_dead_wrappers is not torch_internals._through_a_view
    x = torch.zeros(2, 3)
    assert torch_internals.tensor_check((x,), [[None, 3]], [[3, 1]])(torch.zeros(5, 3))


# Tracing a function needs torch's modes themselves, and a graph break has no public name.
_ELSEWHERE = {"runtime/torch_internals.py", "mods/frontend/trace.py", "integrations/transformers.py"}


def _private_names(source: str) -> list[str]:
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Attribute, ast.ImportFrom))]
    names = (ast.unparse(x) if isinstance(x, ast.Attribute) else f"{x.module}." for x in nodes)
    return [name for name in names if name.startswith(("torch._", "forward_ad._")) and name != "torch.__version__"]


def test_private_names_of_torch_stand_in_one_module():
    package = Path(fa4.__file__).parent
    sources = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    found = {
        name: _private_names(path.read_text())
        for name, path in sources.items()
        if not name.startswith("emulator/") and name not in _ELSEWHERE
    }
    assert not {name: names for name, names in found.items() if names}
