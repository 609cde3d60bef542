"""Caches of traces and of calls: a trace is reused while everything its function can read is unchanged.

There are two tests. `Traversal` describes by value what a function can read, so a function that each call creates anew
finds the earlier trace. `IdentityGuard` compares by identity what a traversal reached, which takes a few comparisons.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .blocks import LISTS
from .templates import Skeleton, Template, template_of
from .trace import Traced, trace_mask, trace_score
from .traversal import IdentityGuard, Traversal

_traces: dict[tuple, tuple[Traced, tuple[int, ...]]] = {}
_MOST_TRACES = 512


def cached_trace(trace: Callable[[Callable], Traced], function: Callable) -> Traced:
    """Return trace(function), or a cached trace of a function that reads the same; tracing takes milliseconds.

    Of tensors, only shape, dtype and requires_grad matter, not values or identity: a graph depends on no more. Of a
    float in a cell of the function, not even the value matters, if there is a `Template`. A function that may read what
    a `Traversal` cannot follow is traced each time.
    """
    try:
        traversal = Traversal(function, IdentityGuard())
        key = _key(trace, traversal)
        cached = _traces.get(key)
    except TypeError:  # Unseen, or no hash
        return trace(function)
    if cached is None:
        traced = _by_template(trace, function, key, traversal)
        positions = _positions(traced, traversal)
        if positions is None:
            return traced
        _make_room(_traces)
        # Without the tensors: the table would keep them alive.
        cached = _traces[key] = traced._replace(tensors=()), positions
    traced, captured_indices = cached
    return traced._replace(tensors=tuple(traversal.tensors[i] for i in captured_indices))


class _Place(NamedTuple):
    """A template with the positions of its tensors; None if there is none yet (`is_new`), or cannot be."""

    template: Template | None
    tensors: tuple[int, ...] = ()
    is_new: bool = False


_templates: dict[tuple, _Place] = {}


def _by_template(trace: Callable[[Callable], Traced], function: Any, key: tuple, traversal: Traversal) -> Traced:
    """Trace a function, or fill its template. A template is made when a function comes with a second number."""
    skeleton = Skeleton.of(function, traversal.key)
    if skeleton is None or not skeleton.is_usual:
        return trace(function)
    template_key = *key[:2], skeleton.key
    place = _templates.get(template_key)
    if place is not None and place.template is not None:
        tensors = tuple(traversal.tensors[i] for i in place.tensors)
        return place.template.filled(skeleton.floats)._replace(tensors=tensors)
    traced = trace(function)
    if place is None:
        _make_room(_templates)
        _templates[template_key] = _Place(None, is_new=True)
    elif place.is_new:
        template, positions = template_of(trace, function, traced, skeleton.floats), _positions(traced, traversal)
        _templates[template_key] = _Place(None) if positions is None else _Place(template, positions)
    return traced


def _positions(traced: Traced, traversal: Traversal) -> tuple[int, ...] | None:
    """Return the position of each captured tensor among those that the traversal reached; None if it missed one."""
    found = [next((i for i, x in enumerate(traversal.tensors) if x is captured), None) for captured in traced.tensors]
    return None if None in found else tuple(i for i in found if i is not None)


def _make_room(table: dict) -> None:
    """Remove the oldest entry of a full table."""
    if len(table) >= _MOST_TRACES:
        del table[next(iter(table))]


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
