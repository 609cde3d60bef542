"""What came of earlier calls: by a key of all that it follows from, and of a call like the one before by one look."""

from __future__ import annotations

import contextlib
import operator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .device import stage

T = TypeVar("T")
MOST = 4096
MOST_OPTIONS = 64


class Remembered(Generic[T]):
    """At most `MOST` values, each for the stage of the devices in which it was found out; full, it forgets them all."""

    def __init__(self) -> None:
        self._values: dict[tuple, tuple[Any, T]] = {}

    def find(self, key: tuple) -> T | None:
        """None where nothing holds here, and where a part of the key has no hash."""
        try:
            there, value = self._values[key]
        except (KeyError, TypeError):
            return None
        return value if there is stage.get() else None

    def keep(self, key: tuple, value: T) -> None:
        if len(self._values) >= MOST:
            self.clear()
        with contextlib.suppress(TypeError):
            self._values[key] = stage.get(), value

    def clear(self) -> None:
        self._values.clear()


class Repeats(Generic[T]):
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

    def keep(self, tensors: tuple, options: tuple, value: T, came_of: object = None) -> None:
        """Keep the value, if the call before with these options led to it too: what comes twice is likely to come
        again. came_of: what tells that, where the value is made anew for each call."""
        came_of = value if came_of is None else came_of
        try:
            before = self._before.get(options)
        except TypeError:
            return
        if before is came_of:
            call = _Call.of(tensors, options, value)
            if call is not None:
                self._calls[options] = call
            return
        if len(self._before) >= MOST_OPTIONS:
            self.clear()
        self._before[options] = came_of

    def clear(self) -> None:
        self._calls.clear()
        self._before.clear()


# What torch's compiled graphs tell their inputs by.
_TensorGuards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)
_grad_mode, _deterministic, _stage = torch.is_grad_enabled, torch._C._get_deterministic_algorithms, stage.get


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

    def __init__(self, tensors: tuple, options: tuple, value: T) -> None:
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
        shapes, strides = [list(x.shape) for x in different], [list(x.stride()) for x in different]
        guards = _TensorGuards(*different, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
        self._check = guards.check
        self._grad_mode, self._deterministic, self._stage = _grad_mode(), _deterministic(), _stage()

    @classmethod
    def of(cls, tensors: tuple, options: tuple, value: T) -> _Call[T] | None:
        """None where it cannot be told: one of the tensors is a number."""
        if _TensorGuards is None or not all(x is None or isinstance(x, Tensor) for x in tensors):
            return None
        call = cls(tensors, options, value)
        return call if call.is_like(tensors, options) else None

    def is_like(self, tensors: tuple, options: tuple) -> bool:
        """Of a call with equal options."""
        if (
            _grad_mode() is not self._grad_mode
            or _deterministic() is not self._deterministic
            or _stage() is not self._stage
            or forward_ad._current_level >= 0
            or self._absent(tensors) != self._nones
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
