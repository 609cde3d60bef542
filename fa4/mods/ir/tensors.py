"""Graph evaluation in torch: a value is a tensor over (batch, key/value heads, group, queries, keys), or some of these.

A value that depends on a row, column or head only is computed once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .dropout import Rate
from .graph import Evaluation, Graph, Node, Number
from .record import NUM_BLOCK_TENSORS, Mods

_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "neg": torch.neg, "abs": torch.abs, "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div,
    "min": torch.minimum, "max": torch.maximum, "mod": torch.remainder, "pow": torch.pow, "exp": torch.exp,
    "exp2": torch.exp2, "log": torch.log, "log2": torch.log2, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt,
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sin": torch.sin, "cos": torch.cos, "erf": torch.erf,
    "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift, "bitand": torch.bitwise_and, "bitor": torch.bitwise_or,
    "bitxor": torch.bitwise_xor, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt,
    "ge": torch.ge, "and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor,
    "not": torch.logical_not, "where": torch.where, "log1p": torch.log1p, "atan2": torch.atan2,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
}  # fmt: skip


def kind_of(dtype: torch.dtype) -> str:
    """Return the kind of numbers of a dtype in a graph."""
    return "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"


class TorchArithmetic:
    """Arithmetic with floats in `dtype` and ints in int64. kinds: of the numbers."""

    def __init__(
        self, tensors: Sequence[Tensor], numbers: Sequence[Number], kinds: Sequence[str], dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.tensors, self.numbers, self.kinds, self.device = tensors, numbers, kinds, device
        self.dtypes = {"float": dtype, "int": torch.int64, "bool": torch.bool}

    def const(self, kind: str, value: Number) -> Tensor:
        return torch.tensor(value, dtype=self.dtypes[kind], device=self.device)

    def number(self, position: int) -> Tensor:
        return self.const(self.kinds[position], self.numbers[position])

    def load(self, tensor: int, indices: tuple[Any, ...], nodes: tuple[Node, ...]) -> Tensor:
        x = self.tensors[tensor].detach()
        try:
            x = x[indices]
        except IndexError as error:
            raise IndexError(f"a captured tensor of shape {tuple(x.shape)} is read beyond its end: {error}") from error
        return x.to(self.dtypes[kind_of(x.dtype)])

    def apply(self, op: str, kind: str, kinds: tuple[str, ...], args: tuple[Any, ...]) -> Tensor:
        return args[0].to(self.dtypes[kind]) if op.startswith("to_") else _OPERATORS[op](*args)


def evaluation(
    graph: Graph, tensors: Sequence[Tensor], numbers: Sequence[Number], inputs: dict[str, Tensor], dtype: torch.dtype
) -> Evaluation:
    """Return the evaluation of a graph on a tile: `inputs` are its indices, int64, and optionally "score"."""
    arithmetic = TorchArithmetic(tensors, numbers, graph.numbers, dtype, inputs["q_idx"].device)
    return Evaluation(graph, arithmetic, inputs)


_KEPT = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)


def for_kernels(x: Tensor) -> Tensor:
    """Convert a captured tensor for device code (`core.traced`): contiguous, at least one axis, few dtypes."""
    x = x.detach()
    if x.numel() >= 1 << 31:
        raise ValueError(f"a captured tensor of shape {tuple(x.shape)} has 2^31 elements or more, expected fewer")
    if x.dtype == torch.bool:
        x = x.contiguous().view(torch.uint8)
    elif x.dtype not in _KEPT:
        x = x.to(torch.float32 if x.dtype.is_floating_point else torch.int32)
    return x.contiguous().view(1) if x.ndim == 0 else x.contiguous()


def kernel_mods(
    mods: Mods, heads: int, backward: bool = False, is_ordered: bool = False, captured: tuple | None = None
) -> tuple:
    """Return the kernel arguments of a call's mods, as `core.traced.ModTensors`. Block lists: per query block, in a
    backward per key block, with `is_ordered` both. heads: query heads."""
    lists: tuple = (None, None)
    if mods.blocks:
        *sides, query_order, key_order = mods.blocks[:NUM_BLOCK_TENSORS]
        of_queries, of_keys = tuple(sides[:4]), tuple(sides[4:])
        primary = (*of_keys, key_order) if backward else (*of_queries, query_order)
        lists = primary, (*of_queries, query_order) if is_ordered else None
    dropout = None
    if mods.dropout_seed is not None:
        rate = Rate.of(mods.dropout_p)
        dropout = mods.dropout_seed, rate.bits(), rate.scale, heads
    return tuple(map(for_kernels, mods.tensors)) or None, mods.typed_numbers() or None, *lists, captured, dropout


def zero_where_masked(evaluated: Evaluation, node: int, p: Tensor) -> Tensor:
    """Return a gradient at every pair of a tile, 0 where P is 0: a derivative may be infinite or NaN at a masked pair,
    and 0 times that is NaN."""
    value = torch.broadcast_to(evaluated.value(node), p.shape)
    return value if evaluated.graph.stays_finite(node) else value.masked_fill(p == 0, 0.0)


def add_gradients(evaluated: Evaluation, p: Tensor, gradients: Sequence[Tensor | None]) -> None:
    """Add a tile's contribution to the gradients of captured tensors; its input "grad" must be set. p: the tile's P."""
    shape = p.shape
    for scatter in evaluated.graph.scatters:
        target = gradients[scatter.tensor]
        if target is None:
            continue
        indices = [evaluated.value(i) for i in scatter.indices]
        value = zero_where_masked(evaluated, scatter.value, p).to(target.dtype)
        # First sum axes along which no index varies, in a fixed order.
        index_shape = torch.broadcast_shapes(*(i.shape for i in indices)) if indices else ()
        index_shape = (1,) * (len(shape) - len(index_shape)) + tuple(index_shape)
        summed = [axis for axis, extent in enumerate(index_shape) if extent == 1]
        if summed:
            value = value.sum(dim=summed, keepdim=True)
        add_where(target, indices, value)


def add_where(target: Tensor, indices: Sequence[Tensor], value: Tensor) -> None:
    """Add each value at the indices (broadcast to its shape), in a fixed order.

    On a GPU torch sorts for an accumulating `index_put_`. On a CPU its threads would add in any order, but additions to
    a tensor of one axis are sequential.
    """
    if not indices:
        target.add_(value.sum())
        return
    targets = [torch.broadcast_to(i, value.shape) for i in indices]
    if target.device.type != "cpu":
        target.index_put_(tuple(targets), value, accumulate=True)
        return
    flat_index = torch.zeros_like(targets[0])
    for i, extent in zip(targets, target.shape):
        if i.numel() and not -extent <= int(i.min()) <= int(i.max()) < extent:
            raise IndexError(
                f"a captured tensor of shape {tuple(target.shape)} is indexed by {int(i.min())} to {int(i.max())}"
            )
        flat_index = flat_index * extent + torch.where(i < 0, i + extent, i)
    target.view(-1).index_add_(0, flat_index.flatten(), value.flatten())
