"""vmap rules: one call instead of all mapped ones, because attention is parallel over batch and heads.

The mapped axis is folded into the batch, without a copy if it is the first axis. Packed sequences have no batch axis,
and a sink's gradient is summed over it: there the mapped axis is folded into the heads. Mapped calls with different
lengths run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..runtime.spec import Saved

_ROWS = (*Saved._fields, "q", "k", "v")  # tensors with a head axis before the last axis
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
_BATCH_AXES = dict.fromkeys((*_ROWS, *_LENGTHS), 0)
_HEAD_AXES = {**dict.fromkeys(_ROWS, -2), "sink": -1}


def rule(operator: Callable[..., Sequence[Tensor]], names: Sequence[str]) -> Callable[..., tuple]:
    """Return a rule for `torch.library.register_vmap`, or for an autograd function's `vmap`.

    Args:
        operator: takes positional arguments and returns tensors: those of one axis like the sink, others like q.
        names: names of its arguments, from the fields of `AttentionInputs` and `Saved`.
    """

    def mapped(info: Any, in_dims: tuple, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        n, dims = info.batch_size, dict(zip(names, in_dims))
        if n == 0:
            raise ValueError("torch.vmap maps fa4 attention over 0 calls, expected one at least")
        by_name = dict(zip(names, arguments, strict=True))
        axes = _axes(by_name, dims)
        if axes is None:
            calls = [operator(*(_part(x, dims[name], i) for name, x in by_name.items())) for i in range(n)]
            stacked = tuple(map(torch.stack, zip(*calls)))
            return stacked, (0,) * len(stacked)
        results = operator(*(_folded(x, dims[name], axes.get(name), n) for name, x in by_name.items()))
        out_dims = tuple((axes["q"] if x.ndim > 1 else -1) % x.ndim for x in results)
        return tuple(x.unflatten(axis, (n, -1)) for x, axis in zip(results, out_dims)), out_dims

    return mapped


def _axes(by_name: dict[str, Any], dims: dict[str, int | None]) -> dict[str, int] | None:
    """Return the axis of each tensor into which the mapped axis is folded; None if calls cannot be joined."""
    if by_name["cu_seqlens_q"] is None and by_name["sink"] is None:
        return _BATCH_AXES
    return _HEAD_AXES if all(dims[name] is None for name in _LENGTHS) else None


def _part(x: Any, dim: int | None, i: int) -> Any:
    return x if dim is None else x.select(dim, i)


def _folded(x: Any, dim: int | None, axis: int | None, n: int) -> Any:
    """Fold the mapped axis `dim` of x, or an expansion of an unmapped x, into `axis`, for all n calls."""
    if axis is None or x is None:
        return x
    x = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
    axis %= x.ndim - 1
    return x.movedim(0, axis).flatten(axis, axis + 1)
