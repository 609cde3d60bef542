"""Check of traced functions against a call's sizes and device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ...runtime.torch_internals import carries_tangent
from ..ir.graph import Graph
from .trace import ModError, Traced, begin_of, name_of


class ModProblem(NamedTuple):
    """Sizes (upper bounds for packed sequences) and device that mods are checked against."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    device: torch.device
    packed: bool = False


def check_fit(role: str, function: Callable, traced: Traced, problem: ModProblem, whose: str = "q") -> None:
    """Check that captured tensors are on the device, have no tangents, and are large enough where an argument directly
    indexes them; likewise tensors that the function makes of numbers.

    whose: owner of the device, for the message.
    """
    who, where = f"{role} {name_of(function)}", begin_of(function)
    extents = {"b": problem.batch, "h": problem.heads}
    if not problem.packed:  # (an upper bound may be far above the lengths)
        extents |= {"q_idx": problem.seqlen_q, "kv_idx": problem.seqlen_k}
    for x in traced.tensors:
        if carries_tangent(x):
            raise NotImplementedError(
                f"{who}: captured a tensor of shape {tuple(x.shape)} that carries a tangent, but fa4 attention has no "
                f"forward-mode derivative{where}"
            )
        if x.device != problem.device:
            raise ValueError(f"{who}: captured a tensor on {x.device}, expected {problem.device} like {whose}{where}")
    for load, axis, name in indexed(traced.graph):
        shape, extent = traced.tensors[load].shape, extents.get(name)
        if extent is not None and shape[axis] < extent:
            raise ModError(
                f"{who}: indexes axis {axis} of a captured tensor of shape {tuple(shape)} by {name}, expected at least "
                f"{extent} entries there{where}"
            )
    for name, entries in traced.reaches:
        extent = extents.get(name)
        if extent is not None and entries < extent:
            raise ModError(
                f"{who}: indexes {entries} numbers that it makes by {name}, expected at least {extent}{where}"
            )


def indexed(graph: Graph) -> Iterator[tuple[int, int, str]]:
    """Yield position, axis and the argument's name for each axis of a captured tensor that an argument directly
    indexes."""
    for load in graph.loads():
        assert isinstance(load.value, int)
        for axis, i in enumerate(load.args):
            node = graph.nodes[i]
            if node.op == "input":
                yield load.value, axis, str(node.value)
