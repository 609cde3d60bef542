"""Tensors that a traced function makes of numbers alone: they have values, which are the same at each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from .graph import Number
from .recorder import NO_COUNTERPART, ModError, Recorder


def make(recorder: Recorder, name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    """What torch's function of this name gives, of numbers and of tensors that were made of them."""
    try:
        with _disable_current_modes(), _OfNumbers():
            growth = _RANGES[name](*args, **kwargs) if name in _RANGES else None
            if growth is not None:
                shape = func(*args, **kwargs | {"device": "meta"})
                if shape.dtype.is_floating_point or (name == "arange" and all(isinstance(x, int) for x in growth)):
                    return _range(recorder, shape if shape.shape[0] > _MOST_MADE else func(*args, **kwargs), growth)
            out = func(*args, **kwargs)
    except IndexError as error:
        raise ModError(str(error)) from error
    for x in tree_leaves(out):
        if isinstance(x, Tensor):
            recorder.made(x)
    return out


def _range(recorder: Recorder, x: Tensor, growth: tuple[Number, Number]) -> Tensor:
    if not x.is_meta:
        recorder.made(x)
    recorder.grows_evenly(x, *growth)
    return x


def _arange(*given: Any, start: Any = 0, end: Any = None, step: Any = 1, **_: Any) -> tuple[Number, Number] | None:
    """The first number and the step; None if they are tensors."""
    if len(given) == 1 and end is None:
        given = (start, *given)
    start, end, step = (*given, *(start, end, step)[len(given) :])
    return (start, step) if all(isinstance(x, (int, float)) for x in (start, end, step)) else None


def _linspace(start: Any, end: Any, steps: int, **_: Any) -> tuple[Number, Number] | None:
    if not isinstance(start, (int, float)) or not isinstance(end, (int, float)):
        return None
    return start, (end - start) / (steps - 1) if steps > 1 else 0.0


_RANGES: dict[str, Callable[..., tuple[Number, Number] | None]] = {"arange": _arange, "linspace": _linspace}
_MOST_MADE = 1 << 20  # numbers of a range, beyond which it has no values, and may be indexed alone


class _OfNumbers(TorchDispatchMode):
    """Lets operators have values that are the same at each call."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.nondeterministic_seeded in func.tags or name.startswith(("empty", "new_empty")):
            raise ModError(f"uses {name}, {NO_COUNTERPART}")
        return func(*args, **(kwargs or {}))
