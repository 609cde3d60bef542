"""Functions that capture another number at each call: the trace of one serves the others, or each is traced."""

import math
import random

import numpy as np
import pytest
import torch

import fa4
from fa4.mods.frontend import trace_cache
from fa4.mods.frontend.trace import trace_mask, trace_score
from tests.forget import forget_calls

TABLE = torch.arange(8.0)


def _nested(x):
    def scaled(score):
        return score * x

    def score_mod(score, b, h, q_idx, kv_idx):
        return scaled(score)

    return score_mod


# Whose traces differ in the captured number only.
FILLED = {
    "bias": lambda x: lambda score, b, h, q_idx, kv_idx: score + x * (kv_idx - q_idx),
    "cap": lambda x: lambda score, b, h, q_idx, kv_idx: x * torch.tanh(score / x),
    "comparison": lambda x: lambda score, b, h, q_idx, kv_idx: torch.where(kv_idx < q_idx * x, score, x - score),
    "tensor": lambda x: lambda score, b, h, q_idx, kv_idx: score - TABLE[h] * x,
    "finite": lambda x: lambda score, b, h, q_idx, kv_idx: score * (x if math.isfinite(x) else 3.5),
}
# Whose traces depend on the number in another way.
TRACED = {
    "product": lambda x: lambda score, b, h, q_idx, kv_idx: score + (3.0 * x) * kv_idx,
    "root": lambda x: lambda score, b, h, q_idx, kv_idx: score + math.sqrt(abs(x)) * kv_idx,
    "c_root": lambda x: lambda score, b, h, q_idx, kv_idx: score + math.exp(-x * x) * kv_idx,
    "branch": lambda x: lambda score, b, h, q_idx, kv_idx: score * x if x > 0.7 else score - x,
    "truth": lambda x: lambda score, b, h, q_idx, kv_idx: score * x if x else score,
    "rounded": lambda x: lambda score, b, h, q_idx, kv_idx: score * x + round(x) * kv_idx,
    "integer": lambda x: lambda score, b, h, q_idx, kv_idx: score * x if x.is_integer() else score - x,
    "text": lambda x: lambda score, b, h, q_idx, kv_idx: score * (x + len(f"{x}")),
    "power": lambda x: lambda score, b, h, q_idx, kv_idx: score.abs() ** x,
    "factor": lambda x: lambda score, b, h, q_idx, kv_idx: torch.add(score, kv_idx, alpha=x),
    "bound": lambda x: lambda score, b, h, q_idx, kv_idx: score * np.maximum(x, -0.7),
    "far_bound": lambda x: lambda score, b, h, q_idx, kv_idx: score * float(np.clip(x, -1e6, 1e6)),
    "remainder": lambda x: lambda score, b, h, q_idx, kv_idx: score * math.fmod(x, 3.5),
    "hash": lambda x: lambda score, b, h, q_idx, kv_idx: score * {x: 3.0}[x],
    "nested": _nested,
}


def numbers(seed):
    rng = random.Random(seed)
    special = [0.0, 1.0, 0.5, -1.0, math.inf, math.nan, 4.0, -7.25, 3e7, 1e-30]
    return [rng.uniform(-3, 3), rng.uniform(-3, 3), *rng.sample(special, len(special)), rng.uniform(-3, 3)]


@pytest.mark.parametrize("name", [*FILLED, *TRACED])
def test_another_number_gives_the_trace_of_its_own_function(seed, name):
    forget_traces()
    make = (FILLED | TRACED)[name]
    for x in numbers(seed):
        try:
            expected = trace_score(make(x))
        except Exception as error:  # such as a comparison of NaN
            with pytest.raises(type(error)):
                trace_cache.cached_trace(trace_score, make(x))
            continue
        found = trace_cache.cached_trace(trace_score, make(x))
        assert found.graph.text == expected.graph.text and repr(found.numbers) == repr(expected.numbers), x
        assert len(found.tensors) == len(expected.tensors), f"{x}, seed {seed}"


def forget_traces():
    trace_cache._traces.clear()
    trace_cache._templates.clear()


@pytest.mark.parametrize("name", FILLED)
def test_the_third_number_is_not_traced(seed, name):
    forget_traces()
    calls = []

    def trace(function):
        calls.append(function)
        return trace_score(function)

    rng = random.Random(seed)
    for _ in range(5):
        trace_cache.cached_trace(trace, FILLED[name](rng.uniform(-3, 3)))
    assert len(calls) == 1 + 1 + 3  # two numbers, and the stand-ins


@pytest.mark.parametrize("name", TRACED)
def test_what_may_depend_on_the_number_is_traced(seed, name):
    forget_traces()
    rng = random.Random(seed)
    for _ in range(3):
        trace_cache.cached_trace(trace_score, TRACED[name](rng.uniform(-3, 3)))
    assert all(place.template is None for place in trace_cache._templates.values())


def test_a_mask_with_another_number(seed):
    forget_traces()
    rng = random.Random(seed)

    def make(x):
        return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < 10 * q_idx) & (kv_idx * x < q_idx)

    for x in [rng.uniform(-3, 3) for _ in range(4)]:
        found, expected = trace_cache.cached_trace(trace_mask, make(x)), trace_mask(make(x))
        assert found.graph.text == expected.graph.text and found.numbers == expected.numbers
    assert [place.template is None for place in trace_cache._templates.values()] == [False]


def test_a_call_uses_its_own_number(seed):
    """Results and gradients are those of a process that has traced nothing else."""
    forget_calls()
    forget_traces()
    torch.manual_seed(seed)
    q, k, v = (torch.randn(1, 9, 2, 8, requires_grad=True) for _ in range(3))

    def results(x):
        out = fa4.flash_attn_func(q, k, v, score_mod=FILLED["bias"](x))
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    of_each = {x: results(x) for x in (0.3, -0.2, 1.7, 1.0, 0.9)}
    assert any(place.template for place in trace_cache._templates.values())
    for x, found in of_each.items():
        forget_calls()
        forget_traces()
        assert all(map(torch.equal, found, results(x))), f"{x}, seed {seed}"
    assert not torch.equal(of_each[1.7][0], of_each[0.9][0])
