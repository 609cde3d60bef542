"""Trace a caller's score_mod or mask_mod to a `Graph`: the function runs once, on 0-dim tensors without values.

Two torch modes record it. `_Functions` handles the caller's torch functions: it turns indexing of captured tensors into
loads, and refuses whatever needs values. `_Operators` handles the aten operators below, including those of autograd,
which differentiates a score_mod. Operators that `fa4.mods.frontend.aten` does not have are decomposed by torch, or
refused with their name and the line of the caller's function. A row (a tensor of one axis) is recorded as its elements,
one operator each.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ..ir.graph import Builder, Graph, Number, Scatter, TensorType
from ..ir.tensors import kind_of
from .aten import LIKE_CONSTANTS, OPERATORS, REDUCTIONS
from .constant_tensors import make
from .recorder import NO_COUNTERPART, ModError, Reach, Recorder, check_plain, without_values
from .unknown import check_use


class Traced(NamedTuple):
    """Graph with its captured tensors and numbers, by position.

    reaches: bounds of the arguments that index tensors which the function makes of numbers.
    """

    graph: Graph
    tensors: tuple[Tensor, ...] = ()
    numbers: tuple[Number, ...] = ()
    reaches: tuple[Reach, ...] = ()


def trace_score(function: Callable[..., Tensor]) -> Traced:
    """Return the graph of score_mod(score, b, h, q_idx, kv_idx) and of its derivative."""
    return _trace("score_mod", function, ("score", "b", "h", "q_idx", "kv_idx"))


def trace_mask(function: Callable[..., Tensor]) -> Traced:
    """Return the graph of mask_mod(b, h, q_idx, kv_idx)."""
    return _trace("mask_mod", function, ("b", "h", "q_idx", "kv_idx"))


def _trace(role: str, function: Callable[..., Tensor], names: tuple[str, ...]) -> Traced:
    _check_signature(role, function, names)
    is_score, default_device = names[0] == "score", torch.get_default_device()
    with _without_modes(), torch.set_grad_enabled(is_score), torch.autocast("cpu", enabled=False):
        recorder = Recorder(default_device)
        operators, functions = _Operators(recorder), _Functions(recorder)
        arguments = [recorder.input(name, torch.float32 if name == "score" else torch.int32) for name in names]
        dscore: int | None = None
        scatters: list[Scatter] = []
        with _naming(role, function), operators, _saving_nodes(recorder):
            with functions:
                # Clone: the function may change the score in place, which autograd forbids for a leaf.
                out = function(*(x.clone() if x.requires_grad else x for x in arguments))
                result = _result(recorder, out, is_score)
            if is_score:
                dscore, scatters = _derivative(recorder, out, arguments[0])
    builder = recorder.builder
    types = [TensorType(x.ndim, str(x.dtype).removeprefix("torch.")) for x in recorder.tensors]
    graph = _pruned(builder, result, types, dscore, scatters)
    numbers = tuple(value for _, value in builder.numbers)
    return Traced(graph, tuple(recorder.tensors), numbers, tuple(dict.fromkeys(recorder.reaches)))


@contextlib.contextmanager
def _naming(role: str, function: Callable) -> Iterator[None]:
    """Add the function and the line to errors, including torch's own errors about the function's calls."""
    try:
        yield
    except ModError as error:
        raise ModError(f"{role} {name_of(function)}: {error}{_where(error, function)}") from error
    except RuntimeError as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, RecursionError) or not last.filename.startswith(_INTERNAL_PATHS):
            raise
        reason = str(error).split("\n")[0]
        raise ModError(f"{role} {name_of(function)}: {reason}{_where(error, function)}") from error


def _saving_nodes(recorder: Recorder) -> contextlib.AbstractContextManager:
    """Make autograd save the nodes of a tensor instead of the tensor, which may then be changed in place."""

    def pack(x: Tensor) -> Any:
        return (x.shape, x.dtype, recorder.elements(x)) if recorder.is_computed(x) else x

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        shape, dtype, nodes = saved
        x = without_values(shape, dtype)
        recorder.set(x, *nodes)
        return x

    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _check_signature(role: str, function: Any, names: tuple[str, ...]) -> None:
    expected = f"expected a function of ({', '.join(names)})"
    if not callable(function):
        raise TypeError(f"{role} is a {type(function).__name__}, {expected}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # it has no signature
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        of = f"{role} {name_of(function)} takes {signature}"
        raise TypeError(f"{of}, {expected}: {error}{begin_of(function)}") from None


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    """Disable other modes: torch.export traces through a function mode, and would put the autocast change below into
    its graph."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)


def _result(recorder: Recorder, out: Any, is_score: bool) -> int:
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


def _derivative(recorder: Recorder, out: Tensor, score: Tensor) -> tuple[int, list[Scatter]]:
    """Differentiate with autograd over the recorded operators; the operators it runs are recorded too."""
    zero = recorder.builder.const(0.0, "float")
    if not out.requires_grad:
        return zero, []
    upstream = recorder.input("grad", out.dtype)
    leaves = [leaf for leaf, _, _ in recorder.leaves]
    dscore, *dloads = torch.autograd.grad(out, [score, *leaves], upstream, allow_unused=True)
    scatters = [
        Scatter(position, indices, node)
        for (_, position, load_indices), x in zip(recorder.leaves, dloads)
        if x is not None
        for indices, node in zip(load_indices, recorder.elements(x))
    ]
    return zero if dscore is None else recorder.node(dscore), scatters


def _pruned(builder: Builder, result: int, types: list[TensorType], dscore: int | None, scatters: list) -> Graph:
    """Return the graph without unused nodes."""
    kinds = [kind for kind, _ in builder.numbers]
    whole = Graph(builder.nodes, result, types, kinds)
    roots = [result] + ([] if dscore is None else [dscore])
    for scatter in scatters:
        roots += [scatter.value, *scatter.indices]
    new_index = {old: new for new, old in enumerate(sorted(whole.needed(*roots)))}
    nodes = [whole.nodes[i]._replace(args=tuple(new_index[j] for j in whole.nodes[i].args)) for i in new_index]
    new_scatters = [
        Scatter(t, tuple(new_index[i] for i in indices), new_index[value]) for t, indices, value in scatters
    ]
    return Graph(nodes, new_index[result], types, kinds, None if dscore is None else new_index[dscore], new_scatters)


# Methods and operators that write to their first argument.
_IN_PLACE = re.compile(
    r"(?!_).*[^_]_$|__setitem__$|__i(add|sub|mul|div|truediv|floordiv|mod|pow|and|or|xor|[lr]shift)__$"
)

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
# Queries of a tensor that need no values.
_QUERIES = frozenset(
    ("__get__", "dim", "ndimension", "size", "numel", "nelement", "__len__", "stride", "is_floating_point",
     "get_device", "element_size", "is_contiguous", "__hash__")
)  # fmt: skip


class _Functions(TorchFunctionMode):
    """Mode that turns captured tensors into loads before autograd and the operators see them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, kwargs, recorder = getattr(func, "__name__", str(func)), kwargs or {}, self.recorder
        leaves = tree_leaves((args, kwargs))
        check_use(name, args, leaves, kwargs)
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if all(map(recorder.is_constant, tensors)):
            return make(recorder, name, func, args, kwargs)
        for x in tensors:
            if not (recorder.is_computed(x) or recorder.is_constant(x)):
                check_plain(x)
        if name in _NEED_VALUES and args and isinstance(args[0], Tensor):
            raise ModError(f"{_NEED_VALUES[name]}; a traced function has none")
        is_in_place = _IN_PLACE.match(name) is not None and bool(args) and isinstance(args[0], Tensor)
        if is_in_place and not recorder.is_computed(args[0]):
            if not recorder.is_constant(args[0]):
                raise ModError(f"changes a captured tensor of shape {tuple(args[0].shape)} in place")
            if args[0].ndim > 1 or (args[0].ndim and name == "__setitem__"):
                raise ModError(f"writes what it computed into a tensor of shape {tuple(args[0].shape)}")
            recorder.to_computed(args[0])
        if name.startswith(("empty", "new_empty")):
            raise ModError(f"uses {name}, {NO_COUNTERPART}")
        if kwargs.get("out") is not None:
            raise ModError(f"uses {name} with out, expected its result to be used")
        if func is Tensor.__getitem__:
            if recorder.is_computed(args[0]):
                raise ModError(f"indexes a computed tensor of shape {tuple(args[0].shape)}")
            return recorder.load(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        if name in _QUERIES:
            return func(*args, **kwargs)
        target = args[:1] if is_in_place else ()
        args, kwargs = tree_map_only(Tensor, self._number, (args[len(target) :], kwargs))
        out = _REPLACED.get(name, func)(*target, *args, **kwargs)
        if isinstance(out, Tensor) and not out.is_meta and not recorder.is_computed(out):
            raise ModError(f"uses {name} on what it computed and on numbers, {NO_COUNTERPART}")
        return out

    def _number(self, x: Tensor) -> Tensor:
        """Return a captured 0-dim tensor as an element, a row as its elements; refuse more axes."""
        if self.recorder.is_computed(x) or (self.recorder.is_constant(x) and not x.ndim):
            return x
        if x.ndim > 1:
            raise ModError(f"uses a tensor of shape {tuple(x.shape)} as a whole, expected it indexed down to a number")
        return self.recorder.row(x) if x.ndim else self.recorder.load(x, ())


def _heaviside(input: Tensor, values: Tensor) -> Tensor:
    """heaviside with a derivative: that of values where the input is 0, else 0."""
    return torch.where(input == 0, values, (input > 0).to(input.dtype))


_REPLACED: dict[str, Callable[..., Tensor]] = {"heaviside": _heaviside}


# Replacements for some unsupported operators.
_HINTS = {name: "; (boundaries < x).sum() counts boundaries" for name in ("bucketize", "searchsorted")}


class _Operators(TorchDispatchMode):
    """Mode that records every operator as nodes; results have shape and dtype, but no values."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self._decomposed: list[Any] = []  # stack of operators being decomposed

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        recorder, kwargs = self.recorder, kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        in_place = name.endswith("_") and not name.startswith("_") and not name.endswith("__")
        record = OPERATORS.get(name.removesuffix("_") if in_place else name)
        if name == "_local_scalar_dense":
            raise ModError("reads a value; a traced function has none")
        if record is None:
            return self._by_decomposition(name, _out_of_place(func) if in_place else func, args, kwargs, in_place)
        if all(x.is_meta or name in LIKE_CONSTANTS for x in args if isinstance(x, Tensor)):
            out = func(*args, **kwargs)
        else:  # torch converted a number to a tensor
            on_meta = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
            with _disable_current_modes():
                out = func(*on_meta[0], **on_meta[1])
        if out.ndim > 1:
            raise ModError(f"{name} makes a tensor of shape {tuple(out.shape)}, expected numbers or rows of them")
        if not out.is_meta:
            return out
        try:
            nodes = self._nodes(name, record, out, args, kwargs)
        except TypeError as error:
            raise ModError(f"uses {name} in a form {NO_COUNTERPART}: {error}") from error
        if in_place:
            recorder.set_in_place(args[0], *nodes)
            return args[0]
        recorder.set(out, *nodes)
        return out

    def _by_decomposition(self, name: str, func: Any, args: tuple, kwargs: dict, in_place: bool) -> Any:
        """Record an operator through its decomposition."""
        try:
            with self:
                out = NotImplemented if func is None else self._decompose(func, args, kwargs)
        except ModError as error:
            raise ModError(f"uses {name}, {NO_COUNTERPART}{_HINTS.get(name, '')}") from error
        if out is NotImplemented:
            raise ModError(f"uses {name}, {NO_COUNTERPART}{_HINTS.get(name, '')}")
        if in_place:
            x = args[0]
            if out.shape != x.shape or not torch.can_cast(out.dtype, x.dtype):
                actual = f"a tensor of shape {tuple(out.shape)}, {out.dtype}"
                raise ModError(f"{name} makes {actual}, expected {tuple(x.shape)}, {x.dtype}: it changes one in place")
            kind = kind_of(x.dtype)
            self.recorder.set_in_place(
                x, *(self.recorder.builder.to(kind, node) for node in self.recorder.elements(out))
            )
            return x
        return out

    def _nodes(self, name: str, record: Callable[..., int], out: Tensor, args: tuple, kwargs: dict) -> list[int]:
        """Return the result's nodes: for each element, the operator on the corresponding elements of the arguments."""
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
        return [record(recorder, kind, *element_args, **element_kwargs) for element_args, element_kwargs in each]

    def _decompose(self, func, args, kwargs):
        """Run the decomposition that torch or the operator's author registered, to a limited recursion depth."""
        if self._decomposed.count(func) >= _MAX_DEPTH:
            return NotImplemented
        self._decomposed.append(func)
        try:
            if func in torch._decomp.decomposition_table:
                return torch._decomp.decomposition_table[func](*args, **kwargs)
            if func.has_kernel_for_dispatch_key(_COMPOSITE):
                return func._op_dk(_COMPOSITE, *args, **kwargs)
            return func.decompose(*args, **kwargs)
        finally:
            self._decomposed.pop()


def _out_of_place(func: Any) -> Any:
    """Return the out-of-place variant of an in-place operator; None if there is none."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    return getattr(getattr(torch.ops.aten, name, None), func._overloadname, None)


_MAX_DEPTH = 4
_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd


def name_of(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def begin_of(function: Callable) -> str:
    """Return where a function's source begins, if known."""
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


_INTERNAL_PATHS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def _where(error: BaseException, function: Callable) -> str:
    """Return the innermost line of the caller's own code in the traceback, else where the function begins."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_INTERNAL_PATHS)]
    return f" ({frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line})" if frames else begin_of(function)
