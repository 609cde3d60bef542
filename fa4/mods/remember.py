"""Traces and calls that come again: a function's trace is the same while its code and what it captured are.

Two looks. A `fingerprint` says by value what a trace depends on, so that a function made anew by every call finds the
trace of the one before. `Watched` says by identity whether an object that was seen before is still what it was, which
takes a few comparisons.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .trace import Traced

_traces: dict[tuple, tuple[Traced, tuple[int, ...]]] = {}
_MOST_TRACES = 512


def remembered(trace: Callable[[Callable], Traced], function: Callable) -> Traced:
    """trace(function), which takes milliseconds, or what it gave for a function of the same code and captured values.

    Of tensors shape, dtype and whether they have gradients count, not values nor identity: a graph knows no more. A
    function that captured something else than numbers, tensors, functions and the like is traced each time.
    """
    tensors: list[Tensor] = []
    try:
        key = (trace, torch.is_grad_enabled(), fingerprint(function, tensors, Watched()))
        known = _traces.get(key)
    except TypeError:  # something whose changes would not be seen, or that has no hash
        return trace(function)
    if known is None:
        traced = trace(function)
        places = [next((i for i, x in enumerate(tensors) if x is captured), None) for captured in traced.tensors]
        if None in places:
            return traced
        if len(_traces) >= _MOST_TRACES:
            _traces.clear()
        # Without the tensors: they would live as long as the table.
        known = _traces[key] = traced._replace(tensors=()), tuple(place for place in places if place is not None)
    traced, at = known
    return traced._replace(tensors=tuple(tensors[i] for i in at))


class Watched:
    """What was met on the way through a function, and whether it is all there still."""

    def __init__(self) -> None:
        self._functions: list[tuple[weakref.ref, tuple]] = []  # not to keep them
        self._cells: list[tuple[types.CellType, Any]] = []
        self._names: list[tuple[dict, str, Any]] = []
        self._lists: list[tuple[list, tuple]] = []
        self._dicts: list[tuple[dict, tuple]] = []
        self._tensors: list[tuple[Tensor, tuple]] = []
        self.is_whole = True  # else there is a part of it that keeps it alive

    def add(self, x: Any) -> None:
        if isinstance(x, Tensor):
            self._tensors.append((x, _kind_of_tensor(x)))
        elif isinstance(x, types.FunctionType):
            self._functions.append((weakref.ref(x), (x.__code__, x.__defaults__, x.__kwdefaults__)))
            self._cells += [(cell, cell.cell_contents) for cell in x.__closure__ or ()]
            self._names += [(x.__globals__, name, x.__globals__[name]) for name in _globals_of(x)]
        elif isinstance(x, list):
            self._lists.append((x, tuple(x)))
        elif isinstance(x, dict):
            self._dicts.append((x, tuple(x.items())))

    def holds(self) -> bool:
        """Whether a fingerprint would be the same. Numbers that are equal but others do not count as the same."""
        for cell, x in self._cells:
            if cell.cell_contents is not x:
                return False
        for reference, (code, defaults, keywords) in self._functions:
            function = reference()
            if (
                function is None
                or function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not keywords
            ):
                return False
        for space, name, x in self._names:
            if space.get(name, self) is not x:
                return False
        for tensor, kind in self._tensors:
            if _kind_of_tensor(tensor) != kind:
                return False
        for elements, items in self._lists:
            if len(elements) != len(items) or any(x is not y for x, y in zip(elements, items)):
                return False
        return all(tuple(x.items()) == items for x, items in self._dicts)


def _kind_of_tensor(x: Tensor) -> tuple:
    return x.dtype, x.shape, x.requires_grad, x.device


def fingerprint(x: Any, tensors: list[Tensor], watched: Watched, within: tuple = ()) -> Any:
    """What of x a trace depends on, as a key; tensors are collected in the order in which they are met."""
    if isinstance(x, Tensor):
        if not any(x is known for known in tensors):
            tensors.append(x)
            watched.add(x)
        place = next(i for i, known in enumerate(tensors) if x is known)
        return "tensor", place, x.dtype, tuple(x.shape), x.requires_grad
    if x is None or isinstance(x, (bool, int, float, str, torch.dtype, torch.device)):
        return type(x), x
    if any(x is outer for outer in within):
        watched.is_whole = False
        return "itself"
    within = (*within, x)
    watched.add(x)
    if isinstance(x, types.FunctionType):
        cells = tuple(cell.cell_contents for cell in x.__closure__ or ())
        held = cells, x.__defaults__, x.__kwdefaults__, tuple(x.__globals__[name] for name in _globals_of(x))
        return x.__code__, fingerprint(held, tensors, watched, within)
    if isinstance(x, functools.partial):
        return "partial", fingerprint((x.func, x.args, x.keywords), tensors, watched, within)
    if isinstance(x, (tuple, list)):
        return type(x), *(fingerprint(y, tensors, watched, within) for y in x)
    if isinstance(x, dict):
        return dict, *((key, fingerprint(y, tensors, watched, within)) for key, y in x.items())
    if isinstance(x, (types.ModuleType, types.BuiltinFunctionType, type)):
        return "fixed", x
    raise TypeError(f"a {type(x).__name__} may change unseen")


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """Global names (and attributes) that code and the functions in it use."""
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return *code.co_names, *(name for const in inner for name in _names(const))


def _globals_of(x: types.FunctionType) -> list[str]:
    return [name for name in _names(x.__code__) if name in x.__globals__]


class Known:
    """What came of calls with the same functions and block mask, while these are what they were: by keys, which say
    what else tells calls apart."""

    def __init__(self, watched: list[Watched], block_mask: Any) -> None:
        self._watched, self._ways = watched, dict[tuple, Any]()
        self._blocks = () if block_mask is None else tuple((name, getattr(block_mask, name)) for name in _OF_BLOCKS)

    def holds(self, block_mask: Any) -> bool:
        for name, x in self._blocks:
            if getattr(block_mask, name) is not x:
                return False
        return all([x.holds() for x in self._watched])  # a list: a generator takes longer than what it asks

    def way(self, key: tuple) -> Any:
        """What was kept under a key, or None."""
        try:
            return self._ways.get(key)
        except TypeError:  # it has no hash
            return None

    def keep(self, key: tuple, way: Any) -> None:
        """Keep what came of a call, if its key has a hash."""
        if len(self._ways) >= _MOST_WAYS:
            self._ways.clear()
        with contextlib.suppress(TypeError):
            self._ways[key] = way


_OF_BLOCKS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices",
    "full_q_num_blocks", "full_q_indices", "mask_mod", "BLOCK_SIZE", "seq_lengths",
)  # fmt: skip
_MOST_WAYS = 256
_known: dict[tuple, Known] = {}


def known(score_mod: Any, mask_mod: Any, block_mask: Any) -> Known | None:
    """What was kept of calls with these three, or None."""
    found = _known.get((id(score_mod), id(mask_mod), id(block_mask)))
    return found if found is not None and found.holds(block_mask) else None


def keep(score_mod: Any, mask_mod: Any, block_mask: Any, functions: list[Any]) -> Known | None:
    """Begin to keep what comes of calls with these, until one of them is gone; None where a change would not be seen.

    functions: those that are traced, a block mask's among them.
    """
    watched = []
    try:
        for function in functions:
            watched.append(Watched())
            fingerprint(function, [], watched[-1])
        given = tuple(x for x in (score_mod, mask_mod, block_mask) if x is not None)
        key = id(score_mod), id(mask_mod), id(block_mask)
        made = Known(watched, block_mask)
        for x in given:
            weakref.finalize(x, _known.pop, key, None).atexit = False
    except (TypeError, AttributeError):  # no weak reference to it, or something whose changes would not be seen
        return None
    if not all(x.is_whole for x in watched):
        return None
    _known[key] = made
    return made
