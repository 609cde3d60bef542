"""The caches of traces and of calls: numbers that are equal but not the same, identity, and what is kept."""

import functools
import gc
import math
import threading
import tracemalloc
import weakref

import numpy as np
import pytest
import torch

import fa4
from fa4.mods.frontend import trace_cache
from fa4.mods.frontend.call import cached_trace
from fa4.mods.frontend.trace import trace_mask, trace_score
from tests.mods import read
from tests.mods.read.mask import by, traced_once

WINDOW = 3


@pytest.mark.parametrize(
    "first, second", [(0.0, -0.0), (np.float32(0), np.float32(-0.0)), (0, False), (1, 1.0), (1, True)]
)
def test_numbers_that_are_equal_but_not_the_same(first, second):
    def make(x):
        kind = lambda: 2 if isinstance(x, bool) else 3 if isinstance(x, int) else 4  # noqa: E731
        return lambda score, b, h, q_idx, kv_idx: score + math.copysign(1.0, x) * q_idx + kind() * kv_idx

    one, other = (cached_trace(trace_score, make(x)) for x in (first, second))
    assert one == trace_score(make(first)) and other == trace_score(make(second)) and one != other


def test_long_doubles_are_numbers_like_others():
    def make(x):
        return lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= int(x)

    assert traced_once(make(np.longdouble(3)))
    numbers = [cached_trace(trace_mask, make(np.longdouble(x))).numbers for x in (3, 5)]
    assert numbers == [trace_mask(make(x)).numbers for x in (3, 5)]


def test_a_nan_is_the_same_as_another(monkeypatch):
    """A trace for each would fill the table."""
    traces = []

    def trace(function):
        traces.append(function)
        return trace_score(function)

    for _ in range(3):
        x = float("nan") * 1.0
        cached_trace(trace, lambda score, b, h, q_idx, kv_idx, x=x: torch.where(q_idx > 3, score, x))
    assert len(traces) == 1


def test_functions_that_lead_to_themselves_and_deep_ones():
    """As in recursion; and nested deeper than Python's stack."""

    def power(x, n):
        return x if n == 0 else power(x, n - 1) * 0.5

    deep = 2.0
    for _ in range(5000):
        deep = [deep]
    q = torch.randn(1, 12, 2, 8)
    for _ in range(2):
        fa4.flash_attn_func(q, q, q, score_mod=lambda score, b, h, q_idx, kv_idx: power(score, 3))
        fa4.flash_attn_func(q, q, q, score_mod=lambda score, b, h, q_idx, kv_idx: score * len(deep))


@pytest.mark.parametrize(
    "name", ["global", "helper", "base_class", "static_method", "cell", "partial", "enum", "table", "wrapped", "ready"]
)
def test_a_usual_function_is_known_by_identity(restored, name):
    table = torch.tensor([3, 5])
    functions = {name: function for name, (function, _) in read.cases().items()} | {
        "enum": by(lambda: read.objects.Kind.NEAR),
        "table": lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= table[h],
        "wrapped": functools.wraps(read.functions.settings)(by(lambda: WINDOW)),
        "ready": fa4.masks.sliding_window(3),
    }
    del functions["wrapped"].window
    q = torch.randn(1, 4, 2, 8)
    fa4.flash_attn_func(q, q, q, mask_mod=functions[name])
    assert trace_cache.known(None, functions[name], None) is not None


OF_EXEC = compile("def score_mod(score, b, h, q_idx, kv_idx): return score * factor", "of_exec", "exec")


def of_exec(factor):
    space = {"factor": factor, "__name__": __name__}
    exec(OF_EXEC, space)
    return space["score_mod"]


def test_what_is_kept_does_not_grow():
    """A captured number that is another one in each call, a function that refers to itself, and functions of exec."""
    q, factor = torch.randn(1, 4, 1, 8), 0.5

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * factor

    def itself(score, b, h, q_idx, kv_idx):
        return score * factor if itself else score

    def calls(count):
        nonlocal factor
        for _ in range(count):
            factor += 0.01
            for function in (score_mod, itself, of_exec(factor)):
                fa4.flash_attn_func(q, q, q, score_mod=function)

    def keeps(count):
        """What a call leaves, without tracing."""
        nonlocal factor
        for _ in range(count):
            factor += 0.01
            for function in (score_mod, itself, of_exec(factor)):
                trace_cache.keep(function, None, None, [function], None)

    calls(600)  # more than the table of traces holds
    gc.collect()
    kept, registry = len(trace_cache._cached_mods), len(weakref.finalize._registry)
    for work in (functools.partial(calls, 40), functools.partial(keeps, 10_000)):
        gc.collect()
        tracemalloc.start()
        work()
        gc.collect()
        grown, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert grown < 400_000, grown
    assert len(trace_cache._cached_mods) == kept and len(weakref.finalize._registry) == registry


def test_kept_functions_are_gone_with_their_last_reference():
    q = torch.randn(1, 4, 1, 8)
    gc.collect()
    kept = len(trace_cache._cached_mods)
    for _ in range(5):
        holder = read.objects.Config()
        holder.mask_mod = lambda b, h, q_idx, kv_idx, of=holder: q_idx - kv_idx <= of.window
        table = torch.tensor([3, 5])
        executed, owner = of_exec(0.5), read.objects.Config()
        owner.tensor = torch.tensor(3)
        owner.mask_mod = lambda b, h, q_idx, kv_idx, t=owner.tensor: q_idx - kv_idx <= t
        owner.tensor.owner = owner
        gone = [weakref.ref(x) for x in (table, holder, executed, owner)]
        mask_mod = fa4.masks.both(holder.mask_mod, lambda b, h, q_idx, kv_idx, t=table: kv_idx <= t[h])
        for _ in range(2):
            fa4.flash_attn_func(q, q, q, mask_mod=mask_mod)
            fa4.flash_attn_func(q, q, q, mask_mod=holder.mask_mod)
            fa4.flash_attn_func(q, q, q, mask_mod=owner.mask_mod)
            fa4.flash_attn_func(q, q, q, score_mod=executed)
        del holder, table, mask_mod, executed, owner
        gc.collect()
        assert not any(x() for x in gone)
    assert len(trace_cache._cached_mods) == kept


def test_threads_with_functions_of_their_own(restored, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, 12, 2, 8, generator=generator)
    expected = [fa4.flash_attn_func(q, q, q, mask_mod=fa4.masks.sliding_window(w)) for w in range(1, 5)]
    wrong = []

    def work(window):
        for _ in range(20):

            def mask_mod(b, h, q_idx, kv_idx):
                return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

            if not torch.equal(fa4.flash_attn_func(q, q, q, mask_mod=mask_mod), expected[window - 1]):
                wrong.append(window)

    threads = [threading.Thread(target=work, args=(w,)) for w in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, f"seed {seed}"
