"""Tensors that a traced function makes of numbers only: they have values, identical in each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ..ir.graph import Number
from .recorder import NO_COUNTERPART, ModError, Recorder


def make(recorder: Recorder, name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run a torch function on numbers and on tensors made of numbers."""
    try:
        with _disable_current_modes(), _ConstantOperators():
            progression = _RANGES[name](*args, **kwargs) if name in _RANGES else None
            if progression is not None:
                shape = func(*args, **kwargs | {"device": "meta"})
                if shape.dtype.is_floating_point or (name == "arange" and all(isinstance(x, int) for x in progression)):
                    x = shape if shape.shape[0] > _MAX_VALUES else func(*args, **kwargs)
                    if not x.is_meta:
                        recorder.set_constant(x)
                    recorder.set_range(x, *progression)
                    return x
            out = func(*args, **kwargs)
    except IndexError as error:
        raise ModError(str(error)) from error
    for x in tree_leaves(out):
        if isinstance(x, Tensor):
            recorder.set_constant(x)
    return out


def _arange(*given: Any, start: Any = 0, end: Any = None, step: Any = 1, **_: Any) -> tuple[Number, Number] | None:
    """Return the first number and the step; None if they are tensors."""
    if len(given) == 1 and end is None:
        given = (start, *given)
    start, end, step = (*given, *(start, end, step)[len(given) :])
    return (start, step) if all(isinstance(x, (int, float)) for x in (start, end, step)) else None


def _linspace(start: Any, end: Any, steps: int, **_: Any) -> tuple[Number, Number] | None:
    if not isinstance(start, (int, float)) or not isinstance(end, (int, float)):
        return None
    return start, (end - start) / (steps - 1) if steps > 1 else 0.0


_RANGES: dict[str, Callable[..., tuple[Number, Number] | None]] = {"arange": _arange, "linspace": _linspace}
_MAX_VALUES = 1 << 20  # elements; a longer range has no values and can only be indexed


class _ConstantOperators(TorchDispatchMode):
    """Mode that lets operators have values which are identical in each call."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if torch.Tag.nondeterministic_seeded in func.tags or name.startswith(("empty", "new_empty")):
            raise ModError(f"uses {name}, {NO_COUNTERPART}")
        return func(*args, **(kwargs or {}))
