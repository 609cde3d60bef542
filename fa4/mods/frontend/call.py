"""Check a call's score_mod, mask_mod and block_mask against its problem, and return them as `Mods`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..ir.ready import ReadyMade, made
from ..ir.record import Mods
from . import blocks
from .problem import ModProblem, check_fit
from .trace import ModError, Traced, begin_of, name_of, trace_mask, trace_score
from .trace_cache import cached_trace

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def gather(
    problem: ModProblem, score_mod: ScoreMod | None, mask_mod: MaskMod | None, block_mask: Any, needs_backward: bool
) -> Mods:
    """Return the `Mods` of a call, without dropout.

    Raises:
        TypeError, ValueError: an argument does not fit the problem. ModError: a function cannot be traced.
    """
    if block_mask is not None:
        if mask_mod is not None:
            raise ValueError("mask_mod and block_mask are both given, expected one: a block_mask has its mask_mod")
        blocks.check(block_mask, problem)
        mask_mod = blocks.mask_mod_of(block_mask)
    found: list[_FoundParts] = []
    for role, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is None:
            found.append(("", [], [], []))
        elif torch.compiler.is_compiling():
            found.append(_as_constants(function, role == "score_mod"))
        else:
            traced = cached_trace(trace_score if role == "score_mod" else trace_mask, function)
            check_fit(role, function, traced, problem)
            found.append((*_plain_parts(traced), list(traced.tensors)))
    (score, numbers, trained, tensors), (mask, mask_numbers, _, mask_tensors) = found
    mods = Mods([*tensors, *mask_tensors], [], score, mask, [*numbers, *mask_numbers], 0, 0, trained)
    return mods if block_mask is None else _with_blocks(mods, block_mask, needs_backward)


_PlainParts = tuple[str, list[float], list[int]]
"""Text of a graph, its numbers, and the positions of captured tensors that get gradients."""
_FoundParts = tuple[str, list[float], list[int], list[Tensor]]
"""The same with the captured tensors."""


def _plain_parts(traced: Traced) -> _PlainParts:
    trained = sorted({scatter.tensor for scatter in traced.graph.scatters})
    return traced.graph.text, [float(x) for x in traced.numbers], trained


def _with_blocks(mods: Mods, block_mask: Any, needs_backward: bool) -> Mods:
    lists = list(blocks.block_lists(block_mask, both_sides=needs_backward or bool(mods.trained)))
    if not torch.compiler.is_compiling():
        lists += blocks.source_tensors(block_mask)
    block_q, block_k = block_mask.BLOCK_SIZE
    return mods._replace(blocks=lists, block_q=block_q, block_k=block_k)


def _as_constants(function: Callable, is_score: bool) -> _FoundParts:
    """Return the parts of a function in a call that torch.compile traces. Graph, numbers and the choice of captured
    tensors are constants of the compiled code, which is recompiled for another function; values of tensors are not. A
    ready-made function, or a partial of a module-level function, may be created in compiled code, from tensors that it
    computes."""
    if isinstance(function, (ReadyMade, functools.partial)):
        parameters: list[Tensor] = []
        text, numbers, trained, positions = _constants_of_parts(_parts(function, parameters), is_score)
        return text, numbers, trained, [parameters[i] for i in positions]
    id(function)  # guards the compiled code: constants are valid for this function only
    return *_constants(function, is_score), _captured(function, is_score)


def _parts(x: Any, tensors: list[Tensor]) -> Any:
    """Decompose a ready-made function, a partial, or one of its parameters into constants; collect its tensors, which
    compiled code may compute."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    if isinstance(x, ReadyMade):
        return _READY, type(x), *[_parts(value, tensors) for value in x._values]
    if isinstance(x, functools.partial):
        names = tuple(x.keywords)
        values = tuple([x.keywords[name] for name in names])
        return _PARTIAL, names, _parts(x.func, tensors), _parts(x.args, tensors), _parts(values, tensors)
    if isinstance(x, tuple):
        return _TUPLE, *[_parts(value, tensors) for value in x]
    if isinstance(x, Tensor):
        tensors.append(x)
        return _TENSOR, len(tensors) - 1, tuple([guard_scalar(extent) for extent in x.shape]), x.dtype, x.requires_grad
    if isinstance(x, (int, float)):  # torch.compile may have made it a symbol
        return _OTHER, guard_scalar(x)
    if callable(x):
        id(x)  # a guard, as in `_as_constants`
    return _OTHER, x


_READY, _PARTIAL, _TUPLE, _TENSOR, _OTHER = range(5)


def _of_parts(parts: Any, tensors: dict[int, Tensor]) -> Any:
    """Invert `_parts`, with placeholder tensors."""
    kind, *parts = parts
    if kind == _READY:
        return made(parts[0], tuple(_of_parts(part, tensors) for part in parts[1:]))
    if kind == _PARTIAL:
        function, args, values = (_of_parts(part, tensors) for part in parts[1:])
        return functools.partial(function, *args, **dict(zip(parts[0], values)))
    if kind == _TUPLE:
        return tuple(_of_parts(part, tensors) for part in parts)
    if kind == _TENSOR:
        position, shape, dtype, requires_grad = parts
        tensors[position] = torch.empty((), dtype=dtype).expand(shape).detach().requires_grad_(requires_grad)
        return tensors[position]
    return parts[0]


def _constant_when_compiled(function: Callable) -> Callable:
    """torch.compiler.assume_constant_result, but without importing torch._dynamo (2 s)."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant_when_compiled
def _constants(function: Callable, is_score: bool) -> _PlainParts:
    return _plain_parts(cached_trace(trace_score if is_score else trace_mask, function))


@_constant_when_compiled
def _constants_of_parts(parts: Any, is_score: bool) -> tuple[str, list[float], list[int], list[int]]:
    """Return `_constants`, and the position of each captured tensor."""
    tensors: dict[int, Tensor] = {}
    with _disable_current_modes():
        function = _of_parts(parts, tensors)
    traced = (trace_score if is_score else trace_mask)(function)
    positions = [next((i for i, x in tensors.items() if x is captured), None) for captured in traced.tensors]
    if None in positions:
        function = getattr(function, "func", function)
        raise ModError(f"{name_of(function)}: reads a tensor that it is not made of{begin_of(function)}")
    return *_plain_parts(traced), [i for i in positions if i is not None]


@_constant_when_compiled
def _captured(function: Callable, is_score: bool) -> list[Tensor]:
    return list(cached_trace(trace_score if is_score else trace_mask, function).tensors)
