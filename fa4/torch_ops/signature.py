"""Signatures of calls: `Signature`, a map from signatures to cached results, and a guard for the last call.

A call's shapes, strides, dtypes, devices, options and torch's modes determine its checks, flags, backend and tiles.
Exactly these make its signature. A call equal to the last one needs no signature: `LastCallGuard` compares the tensors
themselves, in less time.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..runtime.device import device_context, is_shared
from ..runtime.torch_internals import deterministic_algorithms, may_carry_tangents, tensor_check

T = TypeVar("T")
MAX_ENTRIES = 4096
MAX_OPTIONS = 64


class Signature(NamedTuple):
    """Key of a call: everything that determines flags, plans and result shapes.

    kind: the function. layouts: one entry per tensor, see `_layout`. options: the call's other arguments as the caller
    wrote them, and `types` their types, because True == 1. Sizes that shape no code are in neither.
    """

    kind: str
    layouts: tuple
    options: tuple
    types: tuple
    needs_gradients: bool
    deterministic: bool
    shared: bool  # the calls of context parallelism alternate between a whole chip and one that communication shares

    @classmethod
    def of(cls, kind: str, tensors: tuple, options: tuple, free: tuple[int, ...] = ()) -> Signature | None:
        """Return the signature; None if the call may carry tangents, or an argument is invalid.

        Args:
            tensors: the arguments by position; an entry may be None or a number.
            free: positions of packed tensors; their first size, if more than one, is not part of the signature.
        """
        if may_carry_tangents():
            return None
        has_gradients = torch.is_grad_enabled()
        try:
            layouts = tuple([_layout(x, i in free, has_gradients) for i, x in enumerate(tensors)])
            types = _types(options)
            if Tensor in types:  # a tensor option: its value may change
                return None
            return cls(kind, layouts, options, types, has_gradients, deterministic_algorithms(), is_shared())
        except (RuntimeError, AttributeError, IndexError):  # not a tensor, or a tensor without strides
            return None


def _layout(x: Any, is_free: bool, has_gradients: bool) -> Any:
    """Return shape (packed rows: 0, 1 or more), strides, torch layout (a sparse tensor has the strides of an expanded
    one), dtype, device, and whether x needs a gradient."""
    if x is None or type(x) is int:
        return type(x)
    shape = (min(x.shape[0], 2), *x.shape[1:]) if is_free else x.shape
    strides = x.is_contiguous() or x.stride()
    return shape, strides, x.layout, x.dtype, x.device, has_gradients and x.requires_grad


def _types(options: tuple) -> tuple:
    return tuple([_types(x) if type(x) is tuple else type(x) for x in options])


class RouteMap:
    """Map from signatures to at most `MAX_ENTRIES` values; each value is valid in the device context that stored it. A
    full map is cleared."""

    def __init__(self) -> None:
        self._values: dict[Signature, tuple[Any, Any]] = {}

    def find(self, signature: Signature | None) -> Any:
        """Return the value; None without a valid one, or if a part of the signature has no hash."""
        try:
            context, value = self._values[signature]  # type: ignore[index]
        except (KeyError, TypeError):
            return None
        return value if context is device_context.get() else None

    def keep(self, signature: Signature | None, value: Any) -> None:
        if signature is None:
            return
        if len(self._values) >= MAX_ENTRIES:
            self.clear()
        with contextlib.suppress(TypeError):
            self._values[signature] = device_context.get(), value

    def clear(self) -> None:
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)


routes = RouteMap()
"""The process-wide map, shared by all kinds of calls."""


class LastCallGuard(Generic[T]):
    """Cached value of the last call for each options tuple: layers of a model repeat the same call, and a comparison is
    cheaper than a key. Different kinds of layers are kept apart by their options.

    A call consists of its tensors by position (or None) and its options: numbers, strings, None or tuples of these.
    Another call is equal if all of these agree: options including types; tensor types, dispatch keys, dtypes, devices,
    shapes, strides and requires_grad; which tensors are None or the same object; grad mode, torch's deterministic mode
    and the device context. No call is equal while tensors may carry tangents. The caller must check whether a mode or a
    profiler is active.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple, GuardedCall[T]] = {}
        self._previous: dict[tuple, object] = {}

    def find(self, tensors: tuple, options: tuple) -> T | None:
        """Return the value stored for an equal call; None without one."""
        try:
            call = self._calls.get(options)
            return call.value if call is not None and call.is_equal(tensors, options) else None
        except (TypeError, AttributeError, ValueError):
            # Options without a hash; no tensor; an array of numpy, whose equality to None is an array too.
            return None

    def keep(
        self, tensors: tuple, options: tuple, value: T, identity: object = None, free: tuple[int, ...] = ()
    ) -> None:
        """Store the value if the previous call with these options had the same one: it is likely to repeat again.
        identity: compared with the previous call's, if each call builds a new value. free: positions of tensors whose
        first size may differ."""
        identity = value if identity is None else identity
        try:
            previous = self._previous.get(options)
        except TypeError:
            return
        if previous is identity:
            if all(x is None or isinstance(x, Tensor) for x in tensors):  # else a tensor argument is a number
                call = GuardedCall(tensors, options, value, dict.fromkeys(free, Free()))
                if call.is_equal(tensors, options):  # False if this torch has no tensor guards
                    self._calls[options] = call
            return
        if len(self._previous) >= MAX_OPTIONS:
            self.clear()
        self._previous[options] = identity

    def clear(self) -> None:
        self._calls.clear()
        self._previous.clear()


class CallCache(Generic[T]):
    """Two-level cache of calls: a `LastCallGuard` first, then a `RouteMap` by signature."""

    def __init__(self, routes: RouteMap | None = None) -> None:
        """routes: a map that several kinds of calls share."""
        self.last: LastCallGuard[T] = LastCallGuard()
        self.routes = RouteMap() if routes is None else routes

    def keep(self, signature: Signature, tensors: tuple, options: tuple, value: T, free: tuple[int, ...] = ()) -> None:
        """Store the value under the signature, and as that of the last call."""
        self.routes.keep(signature, value)
        self.last.keep(tensors, options, value, free=free)

    def clear(self) -> None:
        self.last.clear()
        self.routes.clear()


_grad_mode, _deterministic, _context = torch.is_grad_enabled, deterministic_algorithms, device_context.get


class Free(NamedTuple):
    """Axes of a tensor whose sizes and strides may differ between equal calls."""

    sizes: tuple[int, ...] = (0,)
    strides: tuple[int, ...] = ()


class GuardedCall(Generic[T]):
    """Test whether a call with equal options equals the stored one. free: by position of a tensor."""

    def __init__(self, tensors: tuple, options: tuple, value: T, free: dict[int, Free]) -> None:
        self.value = value
        self._typed = [(i, x) for i, x in enumerate(options) if not (x is None or isinstance(x, str))]
        positions = range(len(tensors))
        first = {id(tensors[i]): i for i in reversed(positions)}  # first position of each object
        absent = [i for i in positions if tensors[i] is None]
        present = [i for i in positions if i not in absent and first[id(tensors[i])] == i]
        self._aliases = [(i, first[id(tensors[i])]) for i in positions if i not in present + absent]
        self._present, self._absent = _getter(present), _getter(absent)
        self._nones = (None,) * len(absent)
        distinct = self._present(tensors)
        fixed = Free(sizes=())
        shapes = [_without(tensors[i].shape, free.get(i, fixed).sizes) for i in present]
        strides = [_without(tensors[i].stride(), free.get(i, fixed).strides) for i in present]
        self._check = tensor_check(distinct, shapes, strides)
        self._grad_mode, self._deterministic, self._context = _grad_mode(), _deterministic(), _context()

    def is_equal(self, tensors: tuple, options: tuple) -> bool:
        """Compare with a call that has equal options."""
        present = self._present(tensors)
        for x in present:
            if x.is_nested:  # `_check` would query strides, which aborts the process
                return False
        if (
            _grad_mode() is not self._grad_mode
            or _deterministic() is not self._deterministic
            or _context() is not self._context
            or may_carry_tangents()
            or self._absent(tensors) != self._nones
            or self._check is None
            or not self._check(*present)
        ):
            return False
        for i, x in self._typed:
            if options[i] is not x and not _same(options[i], x):
                return False
        return not self._aliases or all(tensors[i] is tensors[j] for i, j in self._aliases)


def _without(numbers: tuple[int, ...], axes: tuple[int, ...]) -> list[int | None]:
    """Return numbers with None at some axes."""
    return [None if axis in axes else x for axis, x in enumerate(numbers)]


def _getter(positions: list[int]) -> Any:
    """Return a function that selects these items of a tuple as a tuple."""
    if positions and positions == [*range(positions[0], positions[-1] + 1)]:
        return operator.itemgetter(slice(positions[0], positions[-1] + 1))
    return operator.itemgetter(*positions) if positions else lambda _: ()


def _same(x: Any, y: Any) -> bool:
    """Whether equal values also have equal types: True == 1 == 1.0."""
    return type(x) is type(y) and (not isinstance(x, tuple) or all(map(_same, x, y)))
