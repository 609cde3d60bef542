"""Calls of a decoder that concatenates its keys: k and v have another row at each call, everything else repeats.

Kernels read the number of keys from k, and plans are made for a rounded number (`ProblemSize.planned`). So the executor
of a call serves all calls with the same rounded number of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..runtime.spec import rounded_keys
from .run.prepare import ALIGNMENT
from .signature import MAX_OPTIONS, Free, GuardedCall

Forward = Callable[[tuple], tuple[Tensor, Tensor]]
"""`run.ForwardExecutor.call_with_tensors`."""

_K, _V = 1, 2  # positions
# k and v may be contiguous, or be transposed from (batch, heads, rows, columns): both have strides with the rows in.
_FREE = {position: Free(sizes=(1,), strides=(0, 2)) for position in (_K, _V)}


class _Growing(NamedTuple):
    """Calls that differ in the number of keys. forwards: by rounded number of keys."""

    guard: GuardedCall
    unit: int  # elements of a vector load
    forwards: dict[int, Forward]

    def forward(self, tensors: tuple, options: tuple) -> Forward | None:
        """Return what serves an equal call; None if nothing does."""
        if not self.guard.is_equal(tensors, options):
            return None
        q, k, v = tensors[:3]
        keys = k.shape[1]
        if v is not k and v.shape[1] != keys:
            return None
        for x in (k, v):
            batch, _, head, _ = x.stride()
            if (batch | head) % self.unit or not (batch and head):
                return None
        return None if keys == q.shape[1] else self.forwards.get(rounded_keys(keys))


class GrowingCalls:
    """Calls by their options, as in `LastCallGuard`. The caller must check that no mode is active."""

    def __init__(self) -> None:
        self._calls: dict[tuple, _Growing] = {}
        self._previous: dict[tuple, tuple] = {}

    def find(self, tensors: tuple, options: tuple) -> Forward | None:
        """Return what serves a call that differs in its keys from calls that were kept."""
        try:
            call = self._calls.get(options)
            return None if call is None else call.forward(tensors, options)
        except (TypeError, AttributeError, ValueError):  # as in `LastCallGuard.find`
            return None

    def keep(self, tensors: tuple, options: tuple, forward: Forward) -> None:
        """Keep the executor of a checked call whose k and v fit its plan as they are, from the second call on that
        differs only in its keys."""
        q, k, v = tensors[:3]
        keys = k.shape[1]
        if keys in (0, q.shape[1]):
            return
        call = self._calls.get(options)
        if call is not None and call.forward(tensors, options) is None and call.guard.is_equal(tensors, options):
            call.forwards[rounded_keys(keys)] = forward
            return
        family = q.shape, k.dtype, *((x.shape[0], *x.shape[2:], x.stride(1), x.stride(3)) for x in (k, v))
        if self._previous.get(options) == family:
            guard = GuardedCall(tensors, options, None, _FREE)
            if guard.is_equal(tensors, options):  # False if this torch has no tensor guards
                self._calls[options] = _Growing(guard, ALIGNMENT // k.element_size(), {rounded_keys(keys): forward})
            return
        if len(self._previous) >= MAX_OPTIONS:
            self.clear()
        self._previous[options] = family

    def clear(self) -> None:
        self._calls.clear()
        self._previous.clear()
