"""Rules for torch.func.vmap: one call in place of all the mapped ones, where attention is parallel anyway.

The mapped axis becomes part of the batch, which copies nothing where it stands first. Packed sequences have no batch
axis, and the gradient of a sink is summed over it: there the mapped axis becomes part of the heads. Where each of the
mapped calls has lengths of its own, they are made one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .spec import Saved

_ROWS = (*Saved._fields, "q", "k", "v")  # what has an axis of heads before its last one
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
_BATCH_AXES = dict.fromkeys((*_ROWS, *_LENGTHS), 0)
_HEAD_AXES = {**dict.fromkeys(_ROWS, -2), "sink": -1}


def rule(operator: Callable[..., Sequence[Tensor]], names: Sequence[str]) -> Callable[..., tuple]:
    """What `torch.library.register_vmap`, or an autograd function's `vmap`, asks for.

    Args:
        operator: takes positional arguments and returns tensors, those of one axis like the sink, others like q.
        names: its arguments, by the fields of `AttentionInputs` and `Saved`.
    """

    def mapped(info: Any, in_dims: tuple, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        n, dims = info.batch_size, dict(zip(names, in_dims))
        if n == 0:
            raise ValueError("torch.vmap maps fa4 attention over 0 calls, expected one at least")
        given = dict(zip(names, arguments, strict=True))
        axes = _axes(given, dims)
        if axes is None:
            calls = [operator(*(_part(x, dims[name], i) for name, x in given.items())) for i in range(n)]
            stacked = tuple(map(torch.stack, zip(*calls)))
            return stacked, (0,) * len(stacked)
        results = operator(*(_folded(x, dims[name], axes.get(name), n) for name, x in given.items()))
        where = tuple((axes["q"] if x.ndim > 1 else -1) % x.ndim for x in results)
        return tuple(x.unflatten(axis, (n, -1)) for x, axis in zip(results, where)), where

    return mapped


def _axes(given: dict[str, Any], dims: dict[str, int | None]) -> dict[str, int] | None:
    """The axis of each tensor that the mapped one becomes part of; None if calls cannot be joined."""
    if given["cu_seqlens_q"] is None and given["sink"] is None:
        return _BATCH_AXES
    return _HEAD_AXES if all(dims[name] is None for name in _LENGTHS) else None


def _part(x: Any, dim: int | None, i: int) -> Any:
    return x if dim is None else x.select(dim, i)


def _folded(x: Any, dim: int | None, axis: int | None, n: int) -> Any:
    """x for all n calls: its mapped axis `dim`, or copies of what all of them share, before `axis` and one with it."""
    if axis is None or x is None:
        return x
    x = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
    axis %= x.ndim - 1
    return x.movedim(0, axis).flatten(axis, axis + 1)
