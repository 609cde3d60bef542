"""`IdentityGuard`: compares the objects that a traversal reached, by identity, with those present at a later call."""

from __future__ import annotations

import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

MISSING = object()  # marks a name without a value


class IdentityGuard:
    """Objects that traversals reached, to be compared by identity later."""

    def __init__(self) -> None:
        self.cells: list[tuple[types.CellType, Any]] = []
        self.names: list[tuple[Any, str, Any]] = []  # in dicts, and in class namespaces
        self.empty: list[dict] = []  # attribute dicts that were empty
        self.is_complete = True  # holds all that is readable, and nothing that keeps the traced function alive
        self._functions: list[tuple[weakref.ref, tuple]] = []  # weak: they must not be kept alive
        self._tensors: list[tuple[Tensor, tuple]] = []
        self._others: list[tuple[Callable[..., bool], tuple]] = []

    def add_function(self, x: types.FunctionType) -> None:
        parts = x.__code__, x.__defaults__, x.__kwdefaults__, x.__dict__ or None
        self._functions.append((weakref.ref(x), parts))

    def add_tensor(self, x: Tensor) -> tuple:
        """Add x, and return the properties that are compared."""
        properties = x.dtype, x.shape, x.stride(), x.device, x.requires_grad
        self._tensors.append((x, properties))
        return properties

    def add_class(self, x: type) -> None:
        space = vars(x)
        self._others.append((_is_same_class, (x, x.__bases__, space, len(space))))

    def add_items(self, x: Any) -> tuple:
        """Add a dict, list, set or deque, and return its items."""
        if isinstance(x, dict):
            items = tuple(x.items())
            self._others.append((_has_same_values, (x, tuple(x), tuple(x.values()))))
        else:
            items = tuple(x)
            self._others.append((_has_same_items, (x, items)))
        return items

    def holds(self) -> bool:
        """Whether a traversal would reach the same objects. Equal but distinct numbers count as changed."""
        try:
            for cell, x in self.cells:
                if cell.cell_contents is not x:
                    return False
        except ValueError:  # an empty cell
            return False
        for reference, (code, defaults, keywords, own) in self._functions:
            function = reference()
            if (
                function is None
                or function.__code__ is not code
                or function.__defaults__ is not defaults
                or function.__kwdefaults__ is not keywords
                or (function.__dict__ or None) is not own
            ):
                return False
        for space, name, x in self.names:
            if space.get(name, MISSING) is not x:
                return False
        if any(self.empty):
            return False
        for is_same, parts in self._others:
            if not is_same(*parts):
                return False
        for tensor, properties in self._tensors:  # (building this tuple in a function would cost more)
            if (tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.requires_grad) != properties:
                return False
        return True


def _is_same_class(x: type, bases: tuple, space: Any, size: int) -> bool:
    """Whether x has the same bases and number of attributes: Python may call an added method without naming it."""
    return x.__bases__ is bases and len(space) == size


def _has_same_items(x: Any, items: tuple) -> bool:
    return len(x) == len(items) and all(map(operator.is_, x, items))


def _has_same_values(x: dict, keys: tuple, values: tuple) -> bool:
    return _has_same_items(x, keys) and all(map(operator.is_, x.values(), values))
