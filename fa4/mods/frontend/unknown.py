"""Numbers that a trace may use but not look at: stand-ins for the floats that a function captures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

_state = threading.local()

# torch's functions of a tensor and a number whose graphs are the same for all numbers.
ARITHMETIC = frozenset(
    ("add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide", "lt", "le", "gt", "ge", "eq",
     "ne", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
     "__rdiv__", "__div__", "__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
)  # fmt: skip


def refusals() -> list[str]:
    """Return what this thread's traces did with an `Unknown` that may depend on its value."""
    if not hasattr(_state, "refusals"):
        _state.refusals = []
    return _state.refusals


def check_use(name: str, args: tuple, leaves: list, kwargs: dict) -> None:
    """Refuse a torch function that gets an `Unknown`, unless it is arithmetic with positional arguments."""
    count = sum(type(x) is Unknown for x in leaves)
    if count and (name not in ARITHMETIC or count != sum(type(x) is Unknown for x in args)):
        refusals().append(name)


class Unknown(float):
    """A float whose value Python code cannot use, except by C functions that take a double: their results differ for
    different stand-ins."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name in _NAMES:
            refusals().append(name)
        raise AttributeError(name)


def _refused(name: str) -> Callable[..., Any]:
    def method(self: Unknown, *args: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor):
            return NotImplemented  # the tensor's method is next
        refusals().append(name)
        raise TypeError(f"{name} of a stand-in for a captured number")

    return method


_NAMES = frozenset(dir(float)) - {"__class__"}
for _name in _NAMES - {
    "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__setattr__", "__delattr__",
    "__doc__", "__dir__", "__getnewargs__", "__getformat__", "__getstate__", "__sizeof__", "__reduce__",
    "__reduce_ex__", "real", "imag",
}:  # fmt: skip
    if callable(getattr(float, _name)):
        setattr(Unknown, _name, _refused(_name))
