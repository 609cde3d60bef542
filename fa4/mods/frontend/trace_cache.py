"""Caches of traces and of calls: a trace is reused while everything its function can read is unchanged.

There are two tests. `Traversal` describes by value what a function can read, so a function that each call creates anew
finds the earlier trace. `IdentityGuard` compares by identity what a traversal reached, which takes a few comparisons.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .blocks import LISTS
from .trace import Traced, trace_mask, trace_score
from .traversal import IdentityGuard, Traversal

_traces: dict[tuple, tuple[Traced, tuple[int, ...]]] = {}
_MOST_TRACES = 512


def cached_trace(trace: Callable[[Callable], Traced], function: Callable) -> Traced:
    """Return trace(function), or a cached trace of a function that reads the same; tracing takes milliseconds.

    Of tensors, only shape, dtype and requires_grad matter, not values or identity: a graph depends on no more. A
    function that may read what a `Traversal` cannot follow is traced each time.
    """
    try:
        traversal = Traversal(function, IdentityGuard())
        key = _key(trace, traversal)
        cached = _traces.get(key)
    except TypeError:  # Unseen, or no hash
        return trace(function)
    if cached is None:
        traced = trace(function)
        indices = [
            next((i for i, x in enumerate(traversal.tensors) if x is captured), None) for captured in traced.tensors
        ]
        if None in indices:
            return traced
        if len(_traces) >= _MOST_TRACES:
            _traces.clear()
        # Without the tensors: the table would keep them alive.
        cached = _traces[key] = traced._replace(tensors=()), tuple(i for i in indices if i is not None)
    traced, captured_indices = cached
    return traced._replace(tensors=tuple(traversal.tensors[i] for i in captured_indices))


def _key(trace: Callable[[Callable], Traced], traversal: Traversal) -> tuple:
    return trace, torch.is_grad_enabled(), traversal.key


class CachedMods:
    """Cached value of calls with the same functions and block mask, valid while these are unchanged."""

    def __init__(self, guards: list[IdentityGuard], key: tuple, given: tuple[Any, Any, Any], value: Any) -> None:
        """given: score_mod, mask_mod and block_mask; the entry under `key` is removed when one of them is collected."""
        self._guards, self.value, block_mask = guards, value, given[2]
        self._blocks = () if block_mask is None else tuple((name, getattr(block_mask, name)) for name in _BLOCK_FIELDS)
        self._lists = [(x, x._version) for _, x in self._blocks if isinstance(x, torch.Tensor)]
        # The weak references belong to this record: a later entry under the same key has its own.
        self._weakrefs = [weakref.ref(x, lambda _: _cached_mods.pop(key, None)) for x in given if x is not None]

    def holds(self, block_mask: Any) -> bool:
        for name, x in self._blocks:
            if getattr(block_mask, name) is not x:
                return False
        for lists, version in self._lists:
            if lists._version != version:
                return False
        return all([x.holds() for x in self._guards])  # a list: a generator costs more than these tests


_BLOCK_FIELDS = (*LISTS, "mask_mod", "BLOCK_SIZE", "seq_lengths")
_cached_mods: dict[tuple, CachedMods] = {}


def known(score_mod: Any, mask_mod: Any, block_mask: Any) -> Any:
    """Return the value cached for these three objects, or None."""
    found = _cached_mods.get((id(score_mod), id(mask_mod), id(block_mask)))
    return found.value if found is not None and found.holds(block_mask) else None


def keep(score_mod: Any, mask_mod: Any, block_mask: Any, functions: list[Any], value: Any) -> bool:
    """Cache a value for calls with these objects until one of them is gone; False if a change could not be detected.

    functions: the traced functions, including a block mask's.
    """
    guards = []
    key = id(score_mod), id(mask_mod), id(block_mask)
    try:
        for function in functions:
            guards.append(IdentityGuard())
            traversal = Traversal(function, guards[-1])
            # A function that changes what it reads has no trace of its present state.
            if not any(_key(trace, traversal) in _traces for trace in (trace_score, trace_mask)):
                return False
        if not all(x.is_complete for x in guards):
            return False
        entry = CachedMods(guards, key, (score_mod, mask_mod, block_mask), value)
    except (TypeError, AttributeError, RuntimeError):  # no weak reference possible, or changes that cannot be detected
        return False
    _cached_mods[key] = entry
    return True
