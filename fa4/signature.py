"""What makes two calls the same: `Signature`, one map from it to what came of a call, and a guard for the last call.

Checks, flags, the choice of backend and tiles follow from a call's shapes, strides, dtypes, devices, options and from
torch's modes. All of these, and nothing else, are its signature, under which the first call leaves what came of it. A
call like the last one needs no signature: `LastCallGuard` compares the tensors themselves, in less time.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .device import stage
from .torch_internals import deterministic_algorithms, may_carry_tangents, tensor_check

T = TypeVar("T")
MOST = 4096
MOST_OPTIONS = 64


class Signature(NamedTuple):
    """Everything that flags, plans and the shapes of results follow from; equal for calls that share them.

    kind: the function. layouts: of each tensor, see `_layout`. options: what the call says besides, as the caller wrote
    it, and `types` of it: True equals 1, and is none. Sizes that shape no code are in neither.
    """

    kind: str
    layouts: tuple
    options: tuple
    types: tuple
    needs_gradients: bool
    deterministic: bool

    @classmethod
    def of(cls, kind: str, tensors: tuple, options: tuple, free: tuple[int, ...] = ()) -> Signature | None:
        """None where a call cannot be told from others: it may carry tangents, or an argument is to be refused.

        Args:
            tensors: each in its place, None or a number there.
            free: places of packed tensors, whose first size may be another if it is more than one.
        """
        if may_carry_tangents():
            return None
        has_gradients = torch.is_grad_enabled()
        try:
            layouts = tuple([_layout(x, i in free, has_gradients) for i, x in enumerate(tensors)])
            types = _types(options)
            if Tensor in types:  # its value may change
                return None
            return cls(kind, layouts, options, types, has_gradients, deterministic_algorithms())
        except (RuntimeError, AttributeError, IndexError):  # no tensor, or one without strides
            return None


def _layout(x: Any, is_free: bool, has_gradients: bool) -> Any:
    """Shape (of packed rows whether there are none, one, or more), strides, dtype, device, and whether it trains."""
    if x is None or type(x) is int:
        return type(x)
    shape = (min(x.shape[0], 2), *x.shape[1:]) if is_free else x.shape
    return shape, x.is_contiguous() or x.stride(), x.dtype, x.device, has_gradients and x.requires_grad


def _types(options: tuple) -> tuple:
    return tuple([_types(x) if type(x) is tuple else type(x) for x in options])


class RouteMap:
    """At most `MOST` values by signature, each for the stage of the devices in which it was found; full, it forgets
    them all."""

    def __init__(self) -> None:
        self._values: dict[Signature, tuple[Any, Any]] = {}

    def find(self, signature: Signature | None) -> Any:
        """None where nothing holds here, and where a part of the signature has no hash."""
        try:
            there, value = self._values[signature]  # type: ignore[index]
        except (KeyError, TypeError):
            return None
        return value if there is stage.get() else None

    def keep(self, signature: Signature | None, value: Any) -> None:
        if signature is None:
            return
        if len(self._values) >= MOST:
            self.clear()
        with contextlib.suppress(TypeError):
            self._values[signature] = stage.get(), value

    def clear(self) -> None:
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)


routes = RouteMap()
"""Of the process: what came of calls, by their kinds."""


class LastCallGuard(Generic[T]):
    """What came of the last call with some options, for calls like it: layers of a model ask the same again, and to
    compare takes less than to make a key. Layers may be of several kinds, if these have options of their own.

    A call is its tensors, each in its place or None there, and its options: numbers, texts, None or tuples of these.
    Another is like it if its options are the same, types included, its tensors have the same types, dispatch keys,
    dtypes, devices, shapes and strides and ask the same for gradients, the same of them are None or are one object, and
    neither grad mode, torch's choice of deterministic algorithms nor the stage of devices has changed. While tensors
    may carry tangents none is. Whether a mode or a profiler watches operators is for the caller to ask.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple, _Call[T]] = {}
        self._before: dict[tuple, object] = {}

    def find(self, tensors: tuple, options: tuple) -> T | None:
        """What was kept of a call like this; None where there is none."""
        try:
            call = self._calls.get(options)
        except TypeError:  # no hash
            return None
        return call.value if call is not None and call.is_like(tensors, options) else None

    def keep(
        self, tensors: tuple, options: tuple, value: T, came_of: object = None, free: tuple[int, ...] = ()
    ) -> None:
        """Keep the value, if the call before with these options led to it too: what comes twice is likely to come
        again. came_of: what tells that, where the value is made anew for each call. free: tensors, by their places,
        whose first size may be another in a call like this."""
        came_of = value if came_of is None else came_of
        try:
            before = self._before.get(options)
        except TypeError:
            return
        if before is came_of:
            call = _Call.of(tensors, options, value, free)
            if call is not None:
                self._calls[options] = call
            return
        if len(self._before) >= MOST_OPTIONS:
            self.clear()
        self._before[options] = came_of

    def clear(self) -> None:
        self._calls.clear()
        self._before.clear()


class CallCache(Generic[T]):
    """What came of calls: of the last one with some options by a look at its tensors, of others by their signatures."""

    def __init__(self, routes: RouteMap | None = None) -> None:
        """routes: one that several kinds of calls share."""
        self.last: LastCallGuard[T] = LastCallGuard()
        self.routes = RouteMap() if routes is None else routes

    def clear(self) -> None:
        self.last.clear()
        self.routes.clear()


_grad_mode, _deterministic, _stage = torch.is_grad_enabled, deterministic_algorithms, stage.get


class _Call(Generic[T]):
    """How to tell a call like one from others that have equal options."""

    __slots__ = (
        "_absent",
        "_check",
        "_deterministic",
        "_grad_mode",
        "_nones",
        "_present",
        "_stage",
        "_twins",
        "_typed",
        "value",
    )

    def __init__(self, tensors: tuple, options: tuple, value: T, free: tuple[int, ...]) -> None:
        self.value = value
        self._typed = [(i, x) for i, x in enumerate(options) if not (x is None or isinstance(x, str))]
        places = range(len(tensors))
        first = {id(tensors[i]): i for i in reversed(places)}  # where each is for the first time
        there = [i for i in places if tensors[i] is not None]
        present, absent = [i for i in there if first[id(tensors[i])] == i], [i for i in places if tensors[i] is None]
        self._twins = [(i, first[id(tensors[i])]) for i in there if i not in present]
        self._present, self._absent = _taker(present), _taker(absent)
        self._nones = (None,) * len(absent)
        different = self._present(tensors)
        shapes = [[None, *tensors[i].shape[1:]] if i in free else list(tensors[i].shape) for i in present]
        strides = [list(x.stride()) for x in different]
        self._check = tensor_check(different, shapes, strides)
        self._grad_mode, self._deterministic, self._stage = _grad_mode(), _deterministic(), _stage()

    @classmethod
    def of(cls, tensors: tuple, options: tuple, value: T, free: tuple[int, ...]) -> _Call[T] | None:
        """None where it cannot be told: one of the tensors is a number, or this torch has no test of tensors."""
        if not all(x is None or isinstance(x, Tensor) for x in tensors):
            return None
        call = cls(tensors, options, value, free)
        return call if call.is_like(tensors, options) else None

    def is_like(self, tensors: tuple, options: tuple) -> bool:
        """Of a call with equal options."""
        if (
            _grad_mode() is not self._grad_mode
            or _deterministic() is not self._deterministic
            or _stage() is not self._stage
            or may_carry_tangents()
            or self._absent(tensors) != self._nones
            or self._check is None
            or not self._check(*self._present(tensors))
        ):
            return False
        for i, x in self._typed:
            if options[i] is not x and not _same(options[i], x):
                return False
        return not self._twins or all(tensors[i] is tensors[j] for i, j in self._twins)


def _taker(places: list[int]) -> Any:
    """What gives those items of a tuple as one."""
    if places and places == [*range(places[0], places[-1] + 1)]:
        return operator.itemgetter(slice(places[0], places[-1] + 1))
    return operator.itemgetter(*places) if places else lambda _: ()


def _same(x: Any, y: Any) -> bool:
    """Of equal values, whether they are the same: True equals 1 and 1.0, and is neither."""
    return type(x) is type(y) and (not isinstance(x, tuple) or all(map(_same, x, y)))
