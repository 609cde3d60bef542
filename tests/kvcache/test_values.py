"""Where values of a call on a cache are looked at, and memory that caches may share."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fa4
from fa4.kvcache import values

from .test_api import ERRORS, NEW, ROTARY, base

COMPILED_ERRORS = (
    "seqlens_beyond", "append_beyond", "leftpad", "batch_idx", "batch_idx_twice", "page_number", "page_twice",
    "rotary_positions", "rotary_positions_of_queries", "rotary_seqlens_negative", "descale_negative", "descale_nan",
    "cu_seqlens_q", "max_seqlen_q", "max_seqlen_k", "one_memory",
)  # fmt: skip


@pytest.mark.parametrize("name", COMPILED_ERRORS)
def test_compiled_code_looks_at_values_when_it_runs(name):
    """It has none when it is compiled. Nothing is written, unless max_seqlen_k is wrong, which only attention has."""
    error, message, change = ERRORS[name]
    given = base() | change
    caches = {name: given[name].clone() for name in ("k_cache", "v_cache")}
    torch._dynamo.reset()
    compiled = torch.compile(fa4.flash_attn_with_kvcache, fullgraph=True, backend="eager")
    with pytest.raises(error, match=message):
        compiled(**given)
    written = any(not torch.equal(given[cache].float(), x.float()) for cache, x in caches.items())
    assert written == (name == "max_seqlen_k")


class _Watching(TorchDispatchMode):
    """Sees operators, and lets them be."""

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        return function(*arguments, **(kwargs or {}))


def test_values_are_looked_at_once(monkeypatch):
    """By the function, or by the operators where these are called."""
    looks = []
    real = values._check
    monkeypatch.setattr(values, "_check", lambda t, *others: looks.append(t.k is not None) or real(t, *others))
    given = base() | ROTARY
    fa4.flash_attn_with_kvcache(**given)
    assert looks == [True]
    with _Watching():
        fa4.flash_attn_with_kvcache(**given)
    assert looks == [True, True, False]


def test_an_append_inside_functionalize_is_refused():
    given = base() | NEW
    with pytest.raises(NotImplementedError, match=r"k and v are given inside torch\.func\.functionalize"):
        torch.func.functionalize(lambda q: fa4.flash_attn_with_kvcache(**given | dict(q=q)))(given["q"])


def test_views_of_one_cache_are_memory_of_their_own(seed):
    """Keys and values side by side, as servers keep them, in both orders of axes."""
    given = base() | NEW
    expected = fa4.flash_attn_with_kvcache(**given | {n: given[n].clone() for n in ("k_cache", "v_cache")})
    for axis in (0, 1, 2, 3):
        both = torch.stack((given["k_cache"], given["v_cache"]), axis)
        k_cache, v_cache = both.unbind(axis)
        assert torch.equal(fa4.flash_attn_with_kvcache(**given | dict(k_cache=k_cache, v_cache=v_cache)), expected)
    moved = {n: given[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("k_cache", "v_cache")}
    assert torch.equal(fa4.flash_attn_with_kvcache(**given | moved), expected)
