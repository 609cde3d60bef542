"""Tensors that a traced function handles: their graph nodes, loads, and tensors made of numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..ir.graph import Builder, Number
from ..ir.tensors import kind_of


class ModError(ValueError):
    """A score_mod or mask_mod cannot be traced, or does not fit the problem; the message says what and where."""


NO_COUNTERPART = "which has no counterpart in kernels"


class _Range(NamedTuple):
    """Evenly spaced numbers: first + the sum of step * index over axes."""

    first: Number
    steps: tuple[Number, ...]


class Reach(NamedTuple):
    """A function argument `name` directly indexes an axis of `entries` numbers that the function made."""

    name: str
    entries: int


class Recorder:
    """State of both modes: what is recorded of each tensor.

    default_device: device of a table of numbers that the function made without a device.
    """

    def __init__(self, default_device: torch.device) -> None:
        self.builder = Builder()
        self.tensors: list[Tensor] = []
        self.reaches: list[Reach] = []
        # Elements, or rows of them, with a gradient: position of the captured tensor, indices of each element.
        self.leaves: list[tuple[Tensor, int, list[tuple[int, ...]]]] = []
        self._default_device = default_device
        self._nodes: dict[int, list[int]] = {}  # nodes of the elements, by id of tensors, which `_kept` keeps alive
        self._parts: dict[int, tuple[int, tuple[int, ...]]] = {}  # captured tensors indexed in part: position, indices
        self._constants: set[int] = set()  # tensors with values, made of numbers
        self._ranges: dict[int, _Range] = {}  # ranges of these, or of one too long to be made
        self._tables: dict[tuple[int, int], Tensor] = {}  # their copies as captured tensors, by version
        self._kept: list[Tensor] = []

    def input(self, name: str, dtype: torch.dtype) -> Tensor:
        x = without_values((), dtype, name == "score")
        self.set(x, self.builder.input(name))
        return x

    def set(self, x: Tensor, *nodes: int) -> None:
        self._kept.append(x)
        self._constants.discard(id(x))
        self._nodes[id(x)] = list(nodes)

    def set_in_place(self, x: Tensor, *nodes: int) -> None:
        """Record an in-place change of x: set its nodes, and those of its views."""
        memory = x.untyped_storage()._cdata
        views = {id(y): y for y in self._kept if id(y) in self._nodes and y.untyped_storage()._cdata == memory}
        self.set(x, *nodes)
        if any(y._is_view() and y.requires_grad for y in views.values()):
            raise ModError("changes a tensor in place that shares its memory with another, its view")
        for view in views.values():
            if len(nodes) not in (1, view.numel()):
                raise ModError(f"changes a view of shape {tuple(x.shape)} in place, of a tensor of another shape")
            self.set(view, *nodes * (view.numel() // len(nodes)))

    def to_computed(self, x: Tensor) -> None:
        """Turn x, made of numbers, into a computed tensor without values."""
        nodes, other = self.elements(x), without_values(tuple(x.shape), x.dtype)
        with _disable_current_modes():
            torch.utils.swap_tensors(x, other)
        self.set(x, *nodes)

    def is_computed(self, x: Tensor) -> bool:
        """Whether x was computed from the function's arguments or captured tensors."""
        return id(x) in self._nodes and id(x) not in self._constants

    def elements(self, x: Tensor) -> list[int]:
        """Return the nodes of a tensor: one if 0-dim, else one per element of the row."""
        if id(x) not in self._nodes:
            if x.is_meta or x.ndim > (1 if self.is_constant(x) else 0):
                raise ModError(f"uses a tensor of shape {tuple(x.shape)} as a whole, expected numbers")
            with _disable_current_modes():
                values = x.reshape(-1).tolist()
            nodes = [self.builder.number(value, kind_of(x.dtype)) for value in values]
            if not self.is_constant(x):  # torch created it
                return nodes
            self._nodes[id(x)] = nodes
        return self._nodes[id(x)]

    def node(self, x: Tensor) -> int:
        (node,) = self.elements(x)
        return node

    def element(self, x: Tensor, i: int) -> Tensor:
        """Return the i-th element of a row (a row of 1 element broadcasts); a 0-dim tensor itself."""
        if not x.ndim:
            return x
        nodes = self.elements(x)
        out = without_values((), x.dtype)
        self.set(out, nodes[i if len(nodes) > 1 else 0])
        return out

    def set_constant(self, x: Tensor) -> None:
        """Record that x has values: the function made it of numbers, or changed such a tensor."""
        self._kept.append(x)
        self._constants.add(id(x))
        self._nodes.pop(id(x), None)
        self._ranges.pop(id(x), None)

    def is_constant(self, x: Tensor) -> bool:
        return id(x) in self._constants

    def set_range(self, x: Tensor, first: Number, step: Number) -> None:
        """Record that a tensor made of numbers is a range; x may have no values."""
        self._kept.append(x)
        self._ranges[id(x)] = _Range(first, (step,))

    def _range_of(self, x: Tensor) -> _Range | None:
        """Return a tensor made of numbers as numbers evenly spaced along each axis; None if they are not."""
        if id(x) in self._ranges or not x.numel():
            return self._ranges.get(id(x))
        with _disable_current_modes():
            values = x.detach().to("cpu", torch.float64 if x.dtype.is_floating_point else torch.int64)
            first = values[(0,) * x.ndim]
            steps = [values.select(axis, min(1, n - 1))[(0,) * (x.ndim - 1)] - first for axis, n in enumerate(x.shape)]
            grid = first
            for axis, (step, n) in enumerate(zip(steps, x.shape)):
                grid = grid + (step * torch.arange(n)).view(-1, *(1,) * (x.ndim - 1 - axis))
            if not torch.equal(grid, values) or (x.dtype == torch.bool and any(steps)):
                return None
            self._ranges[id(x)] = _Range(first.item(), tuple(step.item() for step in steps))
        return self._ranges[id(x)]

    def _range_element(self, x: Tensor, range_: _Range, nodes: tuple[int, ...]) -> Tensor:
        """Return the element of a range at these indices."""
        builder, kind = self.builder, kind_of(x.dtype)
        value = builder.number(range_.first, kind)
        for i, step, entries in zip(nodes, range_.steps, x.shape):
            if builder.nodes[i].op == "input":
                self.reaches.append(Reach(str(builder.nodes[i].value), entries))
            elif builder.nodes[i].op != "const":  # a negative index counts from the end
                wrapped = builder.op("add", i, builder.number(entries, "int"))
                i = builder.op("where", builder.op("lt", i, builder.const(0, "int")), wrapped, i)
            if step:
                value = builder.op("add", builder.op("mul", builder.to(kind, i), builder.number(step, kind)), value)
        out = without_values((), x.dtype)
        self.set(out, value)
        return out

    def load(self, x: Tensor, indices: tuple[Any, ...]) -> Tensor:
        """Return x[indices] of a captured tensor, of a partial index of one, or of a tensor made of numbers."""
        if len(indices) > x.ndim:
            raise ModError(f"indexes a tensor of shape {tuple(x.shape)} by {len(indices)} indices")
        if len(indices) == x.ndim and (self.is_constant(x) or id(x) in self._ranges):
            range_ = self._range_of(x)
            if range_ is not None:
                return self._range_element(
                    x, range_, tuple(self._index(i, extent) for i, extent in zip(indices, x.shape))
                )
        position, prefix = self._part(x)
        whole = self.tensors[position]
        nodes = prefix + tuple(self._index(i, extent) for i, extent in zip(indices, x.shape))
        rest = whole.shape[len(nodes) :]
        if rest:
            out = without_values(rest, whole.dtype)
            self._kept.append(out)
            self._parts[id(out)] = position, nodes
            return out
        return self._loaded((), position, [nodes])

    def row(self, x: Tensor) -> Tensor:
        """Return all elements of a tensor of one axis: captured, made of numbers, or left by a partial index."""
        if x.shape[0] > LONGEST_ROW:
            raise ModError(
                f"uses a tensor of shape {tuple(x.shape)} as a whole, expected at most {LONGEST_ROW} elements: it is "
                "computed with one by one"
            )
        if self.is_constant(x):
            out = without_values(tuple(x.shape), x.dtype)
            self.set(out, *self.elements(x))
            return out
        position, prefix = self._part(x)
        load_indices = [(*prefix, self.builder.const(i, "int")) for i in range(x.shape[0])]
        return self._loaded(tuple(x.shape), position, load_indices)

    def _part(self, x: Tensor) -> tuple[int, tuple[int, ...]]:
        """Return the position of a captured tensor, and the indices that led to x."""
        if id(x) in self._parts:
            return self._parts[id(x)]
        if self.is_constant(x):
            x = self._table(x)
        positions = [i for i, tensor in enumerate(self.tensors) if tensor is x]
        if not positions:
            self.tensors.append(x)
        return (positions or [len(self.tensors) - 1])[0], ()

    def _table(self, x: Tensor) -> Tensor:
        """Return a copy of its present values as a captured tensor."""
        key = id(x), x._version
        if key not in self._tables:
            device = self._default_device if x.device.type == "cpu" else x.device
            with _disable_current_modes():
                self._tables[key] = x.detach().to(device, copy=True)
        return self._tables[key]

    def _loaded(self, shape: tuple[int, ...], position: int, load_indices: list[tuple[int, ...]]) -> Tensor:
        whole = self.tensors[position]
        trains = whole.dtype.is_floating_point and whole.requires_grad and torch.is_grad_enabled()
        out = without_values(shape, whole.dtype, trains)
        self.set(out, *(self.builder.load(position, nodes, kind_of(whole.dtype)) for nodes in load_indices))
        if not trains:
            return out
        self.leaves.append((out, position, load_indices))
        return out.clone()  # a clone may be changed in place, a leaf may not

    def _index(self, i: Any, extent: int) -> int:
        if isinstance(i, int) and not isinstance(i, bool):
            if not -extent <= i < extent:
                raise ModError(f"indexes an axis of {extent} entries by {i}")
            return self.builder.const(i % extent, "int")
        if not isinstance(i, Tensor):
            raise ModError(f"indexes a tensor by {i!r}, expected numbers")
        if i.ndim or i.dtype.is_floating_point or i.dtype == torch.bool:
            raise ModError(
                f"indexes a tensor by a tensor of shape {tuple(i.shape)}, {i.dtype}, expected 0-dim integers"
            )
        return self.node(i if self.is_computed(i) or self.is_constant(i) else self.load(i, ()))


LONGEST_ROW = 256


def check_plain(x: Tensor) -> None:
    """Raise unless a captured tensor is a plain tensor of numbers."""
    actual = None
    if x.is_nested:
        actual = "a nested tensor"
    elif x.layout is not torch.strided:
        actual = f"a tensor of layout {x.layout}"
    elif x.dtype.is_complex or x.is_quantized:
        actual = f"a tensor of dtype {x.dtype}"
    if actual is not None:
        raise ModError(f"captured {actual}, expected a plain one of numbers")


def without_values(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
    with _disable_current_modes():
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)
