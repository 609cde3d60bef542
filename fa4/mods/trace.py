"""From a caller's score_mod or mask_mod to a `Graph`: the function runs once, on 0-dim tensors without values.

Two modes of torch watch it. `_Functions` sees what the caller wrote: it turns indexing of captured tensors into loads
and refuses what would need values. `_Operators` sees the aten operators beneath, and those of autograd, by which the
derivative of a score_mod is taken. Operators that `fa4.mods.aten` does not know are decomposed by torch, or refused by
name, with the line of the caller's function. A row, a tensor of one axis, is its elements: what is computed on one is
recorded for each of them.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from .aten import LIKE_CONSTANTS, OPERATORS, REDUCTIONS, kind_of
from .graph import Builder, Graph, Number, Scatter, TensorType


class ModError(ValueError):
    """A score_mod or mask_mod cannot be traced, or does not fit the problem; the message says what and where."""


class Traced(NamedTuple):
    """A graph with what fills it: captured tensors and numbers, by position."""

    graph: Graph
    tensors: tuple[Tensor, ...] = ()
    numbers: tuple[Number, ...] = ()


def trace_score(function: Callable[..., Tensor]) -> Traced:
    """The graph of score_mod(score, b, h, q_idx, kv_idx) and of its derivative."""
    return _trace("score_mod", function, ("score", "b", "h", "q_idx", "kv_idx"))


def trace_mask(function: Callable[..., Tensor]) -> Traced:
    """The graph of mask_mod(b, h, q_idx, kv_idx)."""
    return _trace("mask_mod", function, ("b", "h", "q_idx", "kv_idx"))


def _trace(role: str, function: Callable[..., Tensor], names: tuple[str, ...]) -> Traced:
    if not callable(function):
        raise TypeError(f"{role} is a {type(function).__name__}, expected a function of ({', '.join(names)})")
    is_score = names[0] == "score"
    with _without_modes(), torch.set_grad_enabled(is_score), torch.autocast("cpu", enabled=False):
        recorder = _Recorder()
        operators, functions = _Operators(recorder), _Functions(recorder)
        arguments = [recorder.input(name, torch.float32 if name == "score" else torch.int32) for name in names]
        with operators, functions:
            try:
                out = function(*arguments)
                result = _result(recorder, out, is_score)
            except ModError as error:
                raise ModError(f"{role} {name_of(function)}: {error}{_where(error, function)}") from error
        dscore: int | None = None
        scatters: list[Scatter] = []
        if is_score:
            with operators:
                dscore, scatters = _derivative(recorder, out, arguments[0])
    builder = recorder.builder
    types = [TensorType(x.ndim, str(x.dtype).removeprefix("torch.")) for x in recorder.tensors]
    graph = _pruned(builder, result, types, dscore, scatters)
    return Traced(graph, tuple(recorder.tensors), tuple(value for _, value in builder.numbers))


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    """Nobody watches but we: torch.export, which traces through a mode for functions, would write our change of
    autocast into its graph."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def _result(recorder: _Recorder, out: Any, is_score: bool) -> int:
    if isinstance(out, (bool, int, float)):
        raise ModError(f"returned {out!r}, expected a tensor computed from its arguments")
    if not isinstance(out, Tensor):
        raise ModError(f"returned a {type(out).__name__}, expected a 0-dim tensor")
    if out.ndim:
        raise ModError(f"returned a tensor of shape {tuple(out.shape)}, expected a 0-dim one (reduce or index it)")
    if is_score and not out.dtype.is_floating_point:
        raise ModError(f"returned {out.dtype}, expected a floating dtype")
    if not is_score and out.dtype != torch.bool:
        raise ModError(f"returned {out.dtype}, expected torch.bool")
    return recorder.node(out)


def _derivative(recorder: _Recorder, out: Tensor, score: Tensor) -> tuple[int, list[Scatter]]:
    """By autograd over the operators that were recorded: what it runs is recorded too."""
    zero = recorder.builder.const(0.0, "float")
    if not out.requires_grad:
        return zero, []
    upstream = recorder.input("grad", out.dtype)
    leaves = [leaf for leaf, _, _ in recorder.leaves]
    dscore, *others = torch.autograd.grad(out, [score, *leaves], upstream, allow_unused=True)
    scatters = [
        Scatter(position, indices, node)
        for (_, position, places), x in zip(recorder.leaves, others)
        if x is not None
        for indices, node in zip(places, recorder.elements(x))
    ]
    return zero if dscore is None else recorder.node(dscore), scatters


def _pruned(builder: Builder, result: int, types: list[TensorType], dscore: int | None, scatters: list) -> Graph:
    """The graph without nodes that nothing needs."""
    kinds = [kind for kind, _ in builder.numbers]
    whole = Graph(builder.nodes, result, types, kinds)
    roots = [result] + ([] if dscore is None else [dscore])
    for scatter in scatters:
        roots += [scatter.value, *scatter.indices]
    place = {old: new for new, old in enumerate(sorted(whole.needed(*roots)))}
    nodes = [whole.nodes[i]._replace(args=tuple(place[j] for j in whole.nodes[i].args)) for i in place]
    moved = [Scatter(t, tuple(place[i] for i in indices), place[value]) for t, indices, value in scatters]
    return Graph(nodes, place[result], types, kinds, None if dscore is None else place[dscore], moved)


class _Recorder:
    """What both modes know of the tensors they see."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.tensors: list[Tensor] = []
        # Elements, or rows of them, that have a gradient: position of the captured tensor, indices of each element.
        self.leaves: list[tuple[Tensor, int, list[tuple[int, ...]]]] = []
        self._nodes: dict[int, list[int]] = {}  # of the elements, by id of tensors, which `_kept` keeps alive
        self._parts: dict[int, tuple[int, tuple[int, ...]]] = {}  # captured tensors indexed in part: position, indices
        self._kept: list[Tensor] = []

    def input(self, name: str, dtype: torch.dtype) -> Tensor:
        x = _without_values((), dtype, name == "score")
        self.set(x, self.builder.input(name))
        return x

    def set(self, x: Tensor, *nodes: int) -> None:
        self._kept.append(x)
        self._nodes[id(x)] = list(nodes)

    def knows(self, x: Tensor) -> bool:
        return id(x) in self._nodes

    def elements(self, x: Tensor) -> list[int]:
        """Nodes: one of a 0-dim tensor, else as many as the row has elements."""
        if id(x) not in self._nodes:
            if x.ndim or x.is_meta:
                raise ModError(f"uses a tensor of shape {tuple(x.shape)} as a whole, expected numbers")
            return [self.builder.number(x.item(), kind_of(x.dtype))]  # made by torch itself, or by the function
        return self._nodes[id(x)]

    def node(self, x: Tensor) -> int:
        (node,) = self.elements(x)
        return node

    def element(self, x: Tensor, i: int) -> Tensor:
        """The i-th element of a row, one of 1 element standing for any; of a 0-dim tensor itself."""
        if not x.ndim:
            return x
        nodes = self.elements(x)
        out = _without_values((), x.dtype)
        self.set(out, nodes[i if len(nodes) > 1 else 0])
        return out

    def made_here(self, x: Tensor) -> None:
        """x is no captured tensor: the function made it of a number."""
        self.set(x, self.builder.number(x.item(), kind_of(x.dtype)))

    def load(self, x: Tensor, indices: tuple[Any, ...]) -> Tensor:
        """x[indices], of a captured tensor or of what such an access gave before."""
        position, before = self._part(x)
        whole = self.tensors[position]
        if len(indices) > x.ndim:
            raise ModError(f"indexes a tensor of shape {tuple(x.shape)} by {len(indices)} indices")
        nodes = before + tuple(self._index(i, extent) for i, extent in zip(indices, x.shape))
        left = whole.shape[len(nodes) :]
        if left:
            out = _without_values(left, whole.dtype)
            self._kept.append(out)
            self._parts[id(out)] = position, nodes
            return out
        return self._loaded((), position, [nodes])

    def row(self, x: Tensor) -> Tensor:
        """All elements of a captured tensor of one axis, or of what is left of one that was indexed in part."""
        if x.shape[0] > LONGEST_ROW:
            raise ModError(
                f"uses a tensor of shape {tuple(x.shape)} as a whole, expected at most {LONGEST_ROW} elements: it is "
                "computed with one by one"
            )
        position, before = self._part(x)
        places = [(*before, self.builder.const(i, "int")) for i in range(x.shape[0])]
        return self._loaded(tuple(x.shape), position, places)

    def _part(self, x: Tensor) -> tuple[int, tuple[int, ...]]:
        """Position of a captured tensor, and the indices that made x of it."""
        if id(x) in self._parts:
            return self._parts[id(x)]
        known = [i for i, tensor in enumerate(self.tensors) if tensor is x]
        if not known:
            self.tensors.append(x)
        return (known or [len(self.tensors) - 1])[0], ()

    def _loaded(self, shape: tuple[int, ...], position: int, places: list[tuple[int, ...]]) -> Tensor:
        whole = self.tensors[position]
        trains = whole.dtype.is_floating_point and whole.requires_grad and torch.is_grad_enabled()
        out = _without_values(shape, whole.dtype, trains)
        self.set(out, *(self.builder.load(position, nodes, kind_of(whole.dtype)) for nodes in places))
        if trains:
            self.leaves.append((out, position, places))
        return out

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
        return self.node(i if self.knows(i) else self.load(i, ()))


LONGEST_ROW = 256


def _without_values(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
    with _disable_current_modes():
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)


_NEED_VALUES = {
    "__bool__": "branches on a value (use torch.where)",
    "item": "reads a value",
    "tolist": "reads a value",
    "__int__": "reads a value as an int",
    "__float__": "reads a value as a float",
    "__index__": "uses a value as a Python index (index a torch.Tensor instead)",
    "__iter__": "iterates over a tensor",
    "__contains__": "searches in a tensor",
}
# Questions about a tensor that need no values.
_QUESTIONS = frozenset(
    ("__get__", "dim", "ndimension", "size", "numel", "nelement", "__len__", "stride", "is_floating_point",
     "get_device", "element_size", "is_contiguous", "__hash__")
)  # fmt: skip


class _Functions(TorchFunctionMode):
    """Captured tensors become loads before autograd and the operators see them."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if name in _NEED_VALUES and args and isinstance(args[0], Tensor):
            raise ModError(f"{_NEED_VALUES[name]}; a traced function has none")
        if func is Tensor.__getitem__:
            if self.recorder.knows(args[0]):
                raise ModError(f"indexes a computed tensor of shape {tuple(args[0].shape)}")
            return self.recorder.load(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        if name in _QUESTIONS:
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Tensor, self._number, (args, kwargs))
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and not out.is_meta:
            if out.ndim:
                raise ModError(f"{name} makes a tensor of shape {tuple(out.shape)}: make it before, and index it here")
            self.recorder.made_here(out)
        return out

    def _number(self, x: Tensor) -> Tensor:
        """A captured 0-dim tensor as an element, a row as its elements; others are indexed first."""
        if self.recorder.knows(x):
            return x
        if x.ndim > 1:
            raise ModError(f"uses a tensor of shape {tuple(x.shape)} as a whole, expected it indexed down to a number")
        return self.recorder.row(x) if x.ndim else self.recorder.load(x, ())


class _Operators(TorchDispatchMode):
    """Records every operator as nodes; what it computes has a shape and dtype, and no values."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        recorder, kwargs = self.recorder, kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        in_place = name.endswith("_") and not name.startswith("_") and not name.endswith("__")
        record = OPERATORS.get(name.removesuffix("_") if in_place else name)
        if record is None:
            try:
                with self:
                    out = NotImplemented if in_place else self._decompose(func, args, kwargs)
            except ModError as error:
                raise ModError(f"uses {name}, which has no counterpart in kernels") from error
            if out is NotImplemented:
                raise ModError(f"uses {name}, which has no counterpart in kernels")
            return out
        if all(x.is_meta or name in LIKE_CONSTANTS for x in args if isinstance(x, Tensor)):
            out = func(*args, **kwargs)
        else:  # a number that torch made a tensor of
            on_meta = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
            with _disable_current_modes():
                out = func(*on_meta[0], **on_meta[1])
        if out.ndim > 1:
            raise ModError(f"{name} makes a tensor of shape {tuple(out.shape)}, expected numbers or rows of them")
        if not out.is_meta:
            return out
        out = args[0] if in_place else out
        recorder.set(out, *self._nodes(name, record, out, args, kwargs))
        return out

    def _nodes(self, name: str, record: Callable[..., int], out: Tensor, args: tuple, kwargs: dict) -> list[int]:
        """Of what an operator gives: for each element those of the arguments' elements."""
        recorder, kind = self.recorder, kind_of(out.dtype)
        lengths = {x.shape[0] for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim}
        if name in REDUCTIONS and lengths:
            return [REDUCTIONS[name](recorder.builder, kind, recorder.elements(args[0]))]
        count = out.shape[0] if out.ndim else 1
        if not lengths <= {1, count}:
            raise ModError(f"uses {name} on rows of {lengths} elements, which has no counterpart in kernels")

        def at(i: int) -> tuple[tuple, dict]:
            return (
                tree_map_only(Tensor, lambda x: recorder.element(x, i), (args, kwargs)) if lengths else (args, kwargs)
            )

        each = map(at, range(count))
        return [record(recorder, kind, *of_args, **of_kwargs) for of_args, of_kwargs in each]

    def _decompose(self, func, args, kwargs):
        """What torch, or who registered it, says that the operator is in terms of others."""
        if func in torch._decomp.decomposition_table:
            return torch._decomp.decomposition_table[func](*args, **kwargs)
        if func.has_kernel_for_dispatch_key(_COMPOSITE):
            return func._op_dk(_COMPOSITE, *args, **kwargs)
        return func.decompose(*args, **kwargs)


_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd


def name_of(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def begin_of(function: Callable) -> str:
    """Where the text of a function begins, if it has one."""
    code = getattr(function, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


_NOT_THE_CALLERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _where(error: BaseException, function: Callable) -> str:
    """The innermost line of the caller's own code on the way to the error, else where the function begins."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_NOT_THE_CALLERS)]
    return f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else begin_of(function)
