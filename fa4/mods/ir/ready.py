"""Ready-made functions as values: the fields of an instance define what it computes."""

from __future__ import annotations

import copy
import inspect
import numbers
from typing import Any

import torch
from torch import Tensor

_PLAIN = frozenset(
    (type(None), bool, int, str, bytes, type(...), type(NotImplemented), torch.dtype, torch.device, torch.layout)
)


def plain_key(x: Any) -> tuple | None:
    """Return a key of an immutable value, with its type, else None. Zeros differ by sign, NaNs are equal."""
    kind = type(x)
    if kind is float:
        return kind, x.hex()
    if kind.__module__ == "numpy" and isinstance(x, numbers.Real):
        value = x.item()  # type: ignore[attr-defined]  # a long double returns itself
        return (kind, repr(x)) if type(value) is kind else (kind, *(plain_key(value) or ()))
    return (kind, x) if kind in _PLAIN else None


class ReadyMade:
    """Immutable score_mod or mask_mod. The annotated names of a subclass, `_fields`, are its parameters: numbers,
    tensors, functions and tuples of these.

    Instances are equal if class, numbers and functions are equal and tensors identical. They can be pickled and
    deep-copied; a deep copy has its own tensors.
    """

    _fields: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        cls._fields = (*cls._fields, *inspect.get_annotations(cls))

    def __init__(self, *values: Any) -> None:
        for name, value in zip(self._fields, values, strict=True):
            object.__setattr__(self, name, value)

    def _keep_tensors(self, axes: str, *values: Any, integer: bool = False) -> None:
        """Initialise from tensors, all of these axes, as in `check_tensor`."""
        for name, x in zip(self._fields, values):
            check_tensor(name, x, axes, integer)
        ReadyMade.__init__(self, *values)

    @property
    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self._fields)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{type(self).__name__} never changes: make another one")

    __delattr__ = __setattr__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and _key(self._values) == _key(other._values)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), _key(self._values)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(_text, self._values))})"

    def __reduce__(self) -> tuple:
        return made, (type(self), self._values)

    def __deepcopy__(self, memo: dict) -> ReadyMade:
        return made(type(self), copy.deepcopy(self._values, memo))


def made(kind: type[ReadyMade], values: tuple[Any, ...]) -> ReadyMade:
    """Construct an instance from `values` without checks."""
    function = kind.__new__(kind)
    ReadyMade.__init__(function, *values)
    return function


def _key(x: Any) -> Any:
    if isinstance(x, tuple):
        return type(x), *map(_key, x)
    if isinstance(x, Tensor):
        return "tensor", id(x)
    return plain_key(x) or x


def _text(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"tensor of shape {tuple(x.shape)}"
    return getattr(x, "__qualname__", None) or repr(x)


def check_tensor(name: str, x: Any, axes: str, integer: bool = False) -> None:
    """Raise unless x is a tensor of these axes ("batch, seqlen"), of numbers or of integers."""
    expected = f"expected a tensor ({axes}) of {'integers' if integer else 'numbers'}"
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}, {expected}")
    if x.dtype.is_complex or x.dtype == torch.bool or (integer and x.dtype.is_floating_point):
        raise TypeError(f"{name} is a tensor of {x.dtype}, {expected}")
    if x.ndim != axes.count(",") + 1:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, {expected}")


def check_whole(name: str, x: Any, least: int) -> None:
    """Raise unless x is an integer of at least `least`."""
    if isinstance(x, bool) or not isinstance(x, numbers.Integral):
        raise TypeError(f"{name} is {x!r}, expected an integer")
    if x < least:
        raise ValueError(f"{name} is {x}, expected at least {least}")
