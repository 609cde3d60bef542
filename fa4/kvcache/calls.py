"""Calls on a cache like an earlier one: their checks have passed, and their way to a kernel is known.

As in `fa4.calls`: what came of a call is left under a key of all that it follows from, and one like the last call with
the same options needs none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import ops, run
from ..remembered import Remembered, Repeats
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


_known: Remembered[Known] = Remembered()
_repeats: Repeats[Known] = Repeats()


def like_the_last(tensors: tuple, given: Given) -> Known | None:
    """What is known of a call by one look. tensors: those of `checks.Tensors` and the sink."""
    return None if ops.watched_beside_tensors() else _repeats.find(tensors, given)


def find(key: tuple | None, tensors: tuple, given: Given) -> Known | None:
    """What is known of a call by its key; the next one like it will be known by one look."""
    known = None if key is None else _known.find(key)
    if known is not None:
        _repeats.keep(tensors, given, known)
    return known


def keep(key: tuple | None, tensors: tuple, given: Given, known: Known) -> None:
    if key is not None:
        _known.keep(key, known)
        _repeats.keep(tensors, given, known)


def clear() -> None:
    """Forget all calls."""
    _known.clear()
    _repeats.clear()


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
