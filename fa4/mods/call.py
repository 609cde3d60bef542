"""A call's score_mod, mask_mod and block_mask, checked against its problem, as the record `Mods`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import blocks
from .blocks import Problem
from .record import Mods
from .remember import remembered
from .trace import ModError, Traced, begin_of, name_of, trace_mask, trace_score

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def gather(
    problem: Problem, score_mod: ScoreMod | None, mask_mod: MaskMod | None, block_mask: Any, needs_backward: bool
) -> Mods:
    """The record of a call without its dropout.

    Raises:
        TypeError, ValueError: an argument does not fit the problem. ModError: a function cannot be traced.
    """
    if block_mask is not None:
        if mask_mod is not None:
            raise ValueError("mask_mod and block_mask are both given, expected one: a block_mask has its mask_mod")
        blocks.check(block_mask, problem)
        mask_mod = blocks.mask_mod_of(block_mask)
    if torch.compiler.is_compiling():
        mods = _as_constants(score_mod, mask_mod)
        return mods if block_mask is None else _with_blocks(mods, block_mask, needs_backward)
    score = None if score_mod is None else remembered(trace_score, score_mod)
    mask = None if mask_mod is None else remembered(trace_mask, mask_mod)
    for role, function, traced in (("score_mod", score_mod, score), ("mask_mod", mask_mod, mask)):
        if function is not None and traced is not None:
            _check_fit(f"{role} {name_of(function)}", begin_of(function), traced, problem)
    tensors: list[Tensor] = []
    numbers: list[float] = []
    for traced in (score, mask):
        if traced is not None:
            tensors += traced.tensors
            numbers += map(float, traced.numbers)
    texts = ["" if traced is None else traced.graph.text for traced in (score, mask)]
    trained = [] if score is None else sorted({scatter.tensor for scatter in score.graph.scatters})
    mods = Mods(tensors, [], texts[0], texts[1], numbers, 0, 0, trained)
    return mods if block_mask is None else _with_blocks(mods, block_mask, needs_backward)


def _with_blocks(mods: Mods, block_mask: Any, needs_backward: bool) -> Mods:
    lists = list(blocks.lists_of(block_mask, both_sides=needs_backward or bool(mods.trained)))
    block_q, block_k = block_mask.BLOCK_SIZE
    return mods._replace(blocks=lists, block_q=block_q, block_k=block_k)


def _as_constants(score_mod: ScoreMod | None, mask_mod: MaskMod | None) -> Mods:
    """The record of a call that torch.compile traces: graphs, numbers and which tensors were captured are constants of
    the compiled code, which is made anew for another function; the values of the tensors are not."""
    texts: list[str] = []
    tensors: list[Tensor] = []
    numbers: list[float] = []
    trained: list[int] = []
    for is_score, function in ((True, score_mod), (False, mask_mod)):
        if function is None:
            texts.append("")
            continue
        id(function)  # a guard of the compiled code: what is constant holds for this very function
        text, own_numbers, own_trained = _constants(function, is_score)
        texts.append(text)
        numbers += own_numbers
        trained += own_trained
        tensors += _captured(function, is_score)
    return Mods(tensors, [], texts[0], texts[1], numbers, 0, 0, trained)


def _constant_when_compiled(function: Callable) -> Callable:
    """As torch.compiler.assume_constant_result, which imports torch._dynamo (2 s) for setting this attribute."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant_when_compiled
def _constants(function: Callable, is_score: bool) -> tuple[str, list[float], list[int]]:
    traced = remembered(trace_score if is_score else trace_mask, function)
    trained = sorted({scatter.tensor for scatter in traced.graph.scatters})
    return traced.graph.text, [float(x) for x in traced.numbers], trained


@_constant_when_compiled
def _captured(function: Callable, is_score: bool) -> list[Tensor]:
    return list(remembered(trace_score if is_score else trace_mask, function).tensors)


def _check_fit(who: str, where: str, traced: Traced, problem: Problem) -> None:
    """Captured tensors are on the device, and large enough where they are indexed by an argument itself."""
    extents = {"b": problem.batch, "h": problem.heads}
    if not problem.packed:  # (an upper bound may be far above the lengths)
        extents |= {"q_idx": problem.seqlen_q, "kv_idx": problem.seqlen_k}
    for x in traced.tensors:
        if x.device != problem.device:
            raise ValueError(f"{who}: captured a tensor on {x.device}, expected {problem.device} like q{where}")
    for load in traced.graph.loads():
        assert isinstance(load.value, int)
        shape = traced.tensors[load.value].shape
        for axis, i in enumerate(load.args):
            node = traced.graph.nodes[i]
            extent = extents.get(str(node.value)) if node.op == "input" else None
            if extent is not None and shape[axis] < extent:
                raise ModError(
                    f"{who}: indexes axis {axis} of a captured tensor of shape {tuple(shape)} by {node.value}, "
                    f"expected at least {extent} entries there{where}"
                )
