"""What a call's functions are checked against."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..torch_internals import may_carry_tangents
from .graph import Graph
from .trace import ModError, Traced, begin_of, name_of


class Problem(NamedTuple):
    """What mods are checked against: sizes, of packed sequences upper bounds, and the device."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    device: torch.device
    packed: bool = False


def check_fit(role: str, function: Callable, traced: Traced, problem: Problem, whose: str = "q") -> None:
    """Captured tensors are on the device, have no tangents, and are large enough where an argument itself indexes them,
    as is what the function makes of numbers.

    whose: the device, for the message.
    """
    who, where = f"{role} {name_of(function)}", begin_of(function)
    extents = {"b": problem.batch, "h": problem.heads}
    if not problem.packed:  # (an upper bound may be far above the lengths)
        extents |= {"q_idx": problem.seqlen_q, "kv_idx": problem.seqlen_k}
    for x in traced.tensors:
        if may_carry_tangents() and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{who}: captured a tensor of shape {tuple(x.shape)} that carries a tangent, but fa4 attention has no "
                f"forward-mode derivative{where}"
            )
        if x.device != problem.device:
            raise ValueError(f"{who}: captured a tensor on {x.device}, expected {problem.device} like {whose}{where}")
    for load, axis, name in _indexed(traced.graph):
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


def entries_of(graph: Graph, tensors: Sequence[Tensor]) -> Iterator[tuple[str, int]]:
    """Of each axis of a captured tensor that an argument itself indexes: the argument's name, and the entries there."""
    for load, axis, name in _indexed(graph):
        yield name, tensors[load].shape[axis]


def _indexed(graph: Graph) -> Iterator[tuple[int, int, str]]:
    """The same: number of the tensor, axis, and name."""
    for load in graph.loads():
        assert isinstance(load.value, int)
        for axis, i in enumerate(load.args):
            node = graph.nodes[i]
            if node.op == "input":
                yield load.value, axis, str(node.value)
