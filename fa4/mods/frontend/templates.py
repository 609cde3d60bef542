"""Traces with places for captured numbers: a function that captures another float need not be traced again.

A template comes from three traces in which `Unknown` numbers stand for the captured floats. The function may only pass
them to torch's arithmetic with a tensor. Whatever else would look at their values makes the template impossible, and
the function is traced for each number. So are numbers that graphs treat apart, such as 0, 1 and NaN.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..ir.graph import is_special
from .trace import Traced
from .unknown import Unknown, refusals


class Skeleton(NamedTuple):
    """What a function reads apart from the floats in its cells; `floats`: these, by cell."""

    key: tuple
    floats: dict[int, float]

    @classmethod
    def of(cls, function: Any, key: tuple) -> Skeleton | None:
        """Return it of a plain function; None if its cells have no floats. key: of the function's `Traversal`."""
        if type(function) is not types.FunctionType or not function.__closure__:
            return None
        floats = {i: x.cell_contents for i, x in enumerate(function.__closure__) if type(x.cell_contents) is float}
        if not floats:
            return None
        start, (code, *parts), *rest = key
        kept = tuple([None if i in floats else part for i, part in enumerate(parts)])
        return cls((start, code, kept, *rest), floats)

    @property
    def is_usual(self) -> bool:
        """Whether a graph would treat no number apart."""
        return not any(map(is_special, self.floats.values()))


class Template(NamedTuple):
    """A trace without tensors, and the cell of each of its numbers that a function captures."""

    traced: Traced
    cells: dict[int, int]

    def filled(self, floats: dict[int, float]) -> Traced:
        numbers = list(self.traced.numbers)
        for i, cell in self.cells.items():
            numbers[i] = floats[cell]
        return self.traced._replace(numbers=tuple(numbers))


def template_of(
    trace: Callable[[Callable], Traced], function: types.FunctionType, traced: Traced, floats: dict[int, float]
) -> Template | None:
    """Return the template of a traced function; None if more than the places of its numbers may depend on them."""
    found = []
    for numbers in _stand_ins(floats):
        refusals().clear()
        try:
            other = trace(_with_cells(function, {cell: Unknown(x) for cell, x in numbers.items()}))
        except Exception:  # of any kind, from the function
            return None
        if refusals() or not _agree(other, traced):
            return None
        cell_of = {x: cell for cell, x in numbers.items()}
        found.append([(cell_of.get(x), x) for x in other.numbers])
    cells: dict[int, int] = {}
    for i, value in enumerate(traced.numbers):
        (cell, *other_cells), of_traces = zip(*(of_trace[i] for of_trace in found))
        if any(other != cell for other in other_cells):
            return None
        if cell is not None:
            cells[i] = cell
        if any(x != value for x in (of_traces if cell is None else [floats[cell]])):
            return None
    return Template(traced._replace(tensors=()), cells)


def _stand_ins(cells: Iterable[int]) -> list[dict[int, float]]:
    """Return sets of numbers for cells. A C function of a number, such as a bound, changes one of them."""
    firsts = (-6.1380247e37, 8.3971563e36, 3.2791409e-21)
    return [{cell: first * (1.17 + n) for n, cell in enumerate(cells)} for first in firsts]


def _with_cells(function: types.FunctionType, numbers: dict[int, float]) -> types.FunctionType:
    """Return the function with these numbers in its cells."""
    closure = function.__closure__ or ()
    cells = tuple(types.CellType(numbers.get(i, cell.cell_contents)) for i, cell in enumerate(closure))
    other = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    other.__kwdefaults__ = function.__kwdefaults__
    other.__dict__.update(function.__dict__)
    return other


def _agree(x: Traced, y: Traced) -> bool:
    same = len(x.tensors) == len(y.tensors) and all(a is b for a, b in zip(x.tensors, y.tensors))
    return same and x.graph.text == y.graph.text and x.reaches == y.reaches and len(x.numbers) == len(y.numbers)
