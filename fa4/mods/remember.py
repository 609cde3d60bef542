"""Traces and calls that come again: a trace is used again while all that its function can read is the same.

Two looks. A `Walk` says by value what a function can read, so that one made anew by every call finds the trace of the
one before. `Watched` says by identity whether what a walk met is the same, which takes a few comparisons.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from .blocks import LISTS
from .reads import Walk, Watched
from .trace import Traced, trace_mask, trace_score

_traces: dict[tuple, tuple[Traced, tuple[int, ...]]] = {}
_MOST_TRACES = 512


def remembered(trace: Callable[[Callable], Traced], function: Callable) -> Traced:
    """trace(function), which takes milliseconds, or what it gave for a function that reads the same.

    Of tensors shape, dtype and whether they have gradients count, not values nor identity: a graph knows no more. A
    function that may read what a `Walk` cannot follow is traced each time.
    """
    try:
        walk = Walk(function, Watched())
        key = _key(trace, walk)
        known = _traces.get(key)
    except TypeError:  # Unseen, or something that has no hash
        return trace(function)
    if known is None:
        traced = trace(function)
        places = [next((i for i, x in enumerate(walk.tensors) if x is captured), None) for captured in traced.tensors]
        if None in places:
            return traced
        if len(_traces) >= _MOST_TRACES:
            _traces.clear()
        # Without the tensors: they would live as long as the table.
        known = _traces[key] = traced._replace(tensors=()), tuple(place for place in places if place is not None)
    traced, at = known
    return traced._replace(tensors=tuple(walk.tensors[i] for i in at))


def _key(trace: Callable[[Callable], Traced], walk: Walk) -> tuple:
    return trace, torch.is_grad_enabled(), walk.key


class CachedMods:
    """What came of calls with the same functions and block mask, while these are what they were."""

    def __init__(self, watched: list[Watched], block_mask: Any, value: Any) -> None:
        self._watched = watched
        self.value = value
        self._blocks = () if block_mask is None else tuple((name, getattr(block_mask, name)) for name in _OF_BLOCKS)
        self._lists = [(x, x._version) for _, x in self._blocks if isinstance(x, torch.Tensor)]
        self._ends: list[weakref.ref] = []

    def forget_with(self, key: tuple, given: list[Any]) -> None:
        """Leave the table when one of `given` is gone. The references are this record's: another in its place has its
        own."""
        self._ends = [weakref.ref(x, lambda _: _known.pop(key, None)) for x in given]

    def holds(self, block_mask: Any) -> bool:
        for name, x in self._blocks:
            if getattr(block_mask, name) is not x:
                return False
        for lists, version in self._lists:
            if lists._version != version:
                return False
        return all([x.holds() for x in self._watched])  # a list: a generator takes longer than what it asks


_OF_BLOCKS = (*LISTS, "mask_mod", "BLOCK_SIZE", "seq_lengths")
_known: dict[tuple, CachedMods] = {}


def known(score_mod: Any, mask_mod: Any, block_mask: Any) -> CachedMods | None:
    """What was kept of calls with these three, or None."""
    found = _known.get((id(score_mod), id(mask_mod), id(block_mask)))
    return found if found is not None and found.holds(block_mask) else None


def keep(score_mod: Any, mask_mod: Any, block_mask: Any, functions: list[Any], value: Any) -> bool:
    """Begin to keep a value for calls with these, until one of them is gone; False where a change would not be seen.

    functions: those that were traced, a block mask's among them.
    """
    watched = []
    key = id(score_mod), id(mask_mod), id(block_mask)
    try:
        for function in functions:
            watched.append(Watched())
            walk = Walk(function, watched[-1])
            # A function that changes what it reads has no trace for what there is now.
            if not any(_key(trace, walk) in _traces for trace in (trace_score, trace_mask)):
                return False
        if not all(x.is_whole for x in watched):
            return False
        made = CachedMods(watched, block_mask, value)
        made.forget_with(key, [x for x in (score_mod, mask_mod, block_mask) if x is not None])
    except (TypeError, AttributeError, RuntimeError):  # no weak reference to it, or changes that would not be seen
        return False
    _known[key] = made
    return True
