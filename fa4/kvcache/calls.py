"""Calls on a cache like an earlier one: their checks have passed, and their way to a kernel is known.

As in `fa4.calls`, whose way of telling tensors alike this is: what came of a call is left under a key of all that it
follows from, and the last call with the same options, one for each layer of a model that has several kinds, is told by
a look that takes less than to make that key.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import ops, run
from ..calls import TensorGuards, guards
from ..device import stage
from ..remembered import Remembered
from ..spec import AttentionInputs, Cache, Flags
from .append import Append
from .ops import is_plain, route
from .record import Appended


class Given(NamedTuple):
    """What a call says besides its tensors, as the caller wrote it."""

    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    backend: Any
    num_splits: Any
    batch_invariant: Any
    rotary_interleaved: Any
    max_seqlen_q: Any
    max_seqlen_k: Any


class Known:
    """What came of a call's checks, and its way to a kernel: the same whenever a call of such shapes comes again."""

    def __init__(self, flags: Flags, max_seqlens: tuple[int, int]) -> None:
        self.flags, self.max_seqlens = flags, max_seqlens
        self._append: Append | None = None
        self._forward: run.Forward | None = None
        self._is_plain = False

    def append(self, appended: Appended) -> tuple[Tensor, Tensor]:
        """(q, rotated if that was asked for, and the rows of each sequence then in the cache)."""
        if self._append is None:
            self._append = Append(appended)
        turned, seqlens = self._append(appended)
        return appended.q if turned is None else turned, seqlens

    def run(self, inputs: AttentionInputs, cache: Cache) -> tuple[Tensor, Tensor]:
        """(out, lse) of a call without mods."""
        if self._forward is None:
            self._is_plain = is_plain(inputs, cache)
            if self._is_plain:
                self._forward = ops.route(inputs, self.flags).forward
            else:
                self._forward = run.Forward(inputs, *route(inputs, cache, None, self.flags))
        return self._forward(inputs) if self._is_plain else self._forward(inputs, None, cache)


class Last:
    """The tensors of the last call with some options, and how to tell others like them."""

    __slots__ = "_absent", "_grad_mode", "_guards", "_nones", "_present", "_stage", "_twins", "_types", "known"

    def __init__(self, tensors: tuple, given: Given, known: Known) -> None:
        first = {id(x): i for i, x in reversed([*enumerate(tensors)])}  # where each is for the first time
        present = [i for i, x in enumerate(tensors) if x is not None and first[id(x)] == i]
        absent = [i for i, x in enumerate(tensors) if x is None]
        self._twins = [(i, first[id(x)]) for i, x in enumerate(tensors) if x is not None and first[id(x)] < i]
        self._present, self._absent = operator.itemgetter(*present), operator.itemgetter(*absent)
        self._nones, self._types = (None,) * len(absent), tuple(map(type, given))
        self._guards, self.known = guards(*self._present(tensors)), known
        self._grad_mode, self._stage = torch.is_grad_enabled(), stage.get()

    @staticmethod
    def of(tensors: tuple, given: Given, known: Known) -> Last | None:
        """None where they cannot be told so: one is a number."""
        there = [x for x in tensors if x is not None]
        if TensorGuards is None or not all(isinstance(x, Tensor) for x in there) or len(there) > len(tensors) - 2:
            return None
        last = Last(tensors, given, known)
        return last if last.is_like(tensors, given) else None

    def is_like(self, tensors: tuple, given: Given) -> bool:
        """Of a call with equal options."""
        return (
            all(map(operator.is_, map(type, given), self._types))  # True equals 1, and is none
            and torch.is_grad_enabled() is self._grad_mode
            and forward_ad._current_level < 0
            and self._stage is stage.get()
            and not ops.watched_beside_tensors()
            and all(map(operator.is_, self._absent(tensors), self._nones))
            and self._guards.check(*self._present(tensors))
            and all(tensors[i] is tensors[j] for i, j in self._twins)
        )


_known: Remembered[Known] = Remembered()
_lasts: dict[Given, Last] = {}
_MOST_OPTIONS = 64


def like_the_last(tensors: tuple, given: Given) -> Known | None:
    """What is known of a call by one look. tensors: those of `checks.Tensors` and the sink."""
    if torch.compiler.is_compiling():  # a graph shall not depend on it
        return None
    try:
        last = _lasts.get(given)
    except TypeError:  # no hash
        return None
    return last.known if last is not None and last.is_like(tensors, given) else None


def find(key: tuple | None, tensors: tuple, given: Given) -> Known | None:
    """What is known of a call by its key; the next one like it will be known by one look."""
    known = None if key is None else _known.find(key)
    # (a window that is a list has no hash, one that holds True or 1.0 equals another)
    if known is not None and {type(x) for x in given.window_size} <= {int, type(None)}:
        last = Last.of(tensors, given, known)
        if last is not None and isinstance(given.window_size, tuple):
            if len(_lasts) >= _MOST_OPTIONS:
                _lasts.clear()
            _lasts[given] = last
    return known


def keep(key: tuple | None, known: Known) -> None:
    if key is not None:
        _known.keep(key, known)


def clear() -> None:
    """Forget all calls."""
    _known.clear()
    _lasts.clear()


def key_of(tensors: tuple, given: Given) -> tuple | None:
    """What tells a call from those with other flags or another way; None where that is more than can be told."""
    if forward_ad._current_level >= 0 or isinstance(given.max_seqlen_q, Tensor):  # to be refused, or without a value
        return None
    grad = torch.is_grad_enabled()
    try:
        layouts = [
            x
            if x is None
            else int
            if type(x) is int
            else (x.shape, x.is_contiguous() or x.stride(), x.dtype, x.device, grad and x.requires_grad)
            for x in tensors
        ]
        # True equals 1, and is none.
        return *layouts, *given, *map(type, given), *map(type, given.window_size)
    except (RuntimeError, TypeError, AttributeError):  # no tensor, one without strides, or no window, to be refused
        return None
