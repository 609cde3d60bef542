"""Nested tensors of torch's jagged layout, (batch, seqlen of each, heads, head_dim), are packed sequences.

What packs and unpacks them are torch's own operators on nested tensors, which autograd knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged
from torch.nn import functional


def is_jagged(arguments: tuple) -> bool:
    """Whether one of a call's q, k and v, which come first, is jagged."""
    return any(getattr(x, "layout", None) is torch.jagged for x in arguments[:3])


def packed(arguments: tuple) -> tuple:
    """The fields of `AttentionInputs` of a call on packed sequences, of those of a call on jagged q, k and v."""
    q, k, v, sink, *_, seqused_k, _, _ = arguments
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.layout is not torch.jagged:
            came = f"has layout {x.layout}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
            raise TypeError(f"{name} {came}, expected torch.jagged: q, k and v are all nested, or none is")
        if x.ndim != 4 or getattr(x, "_ragged_idx", 1) != 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (batch, lengths, heads, head_dim)")
    if seqused_k is not None:
        raise TypeError("seqused_k came with a nested k, expected None: its lengths say what is used")
    if v.offsets() is not k.offsets() or v.lengths() is not k.lengths():
        raise ValueError(
            "v has lengths of its own, expected k's: make it by "
            "torch.nested.nested_tensor_from_jagged(values, k.offsets(), k.lengths())"
        )
    has_holes = q.lengths() is not None or k.lengths() is not None
    bounds, used, longest = zip(*(_lengths(x, has_holes) for x in (q, k)))
    return (q.values(), k.values(), v.values(), sink, *bounds, *used, *longest)


def nested(out: Tensor, lse: Tensor, q: Any) -> tuple[Tensor, Tensor]:
    """out and lse of packed sequences, nested like q: (batch, lengths, heads, head_dim_v), (batch, heads, lengths)."""
    like = {"offsets": q.offsets(), "lengths": q.lengths()}
    return nested_tensor_from_jagged(out, **like), nested_tensor_from_jagged(lse, **like, jagged_dim=2)


def _lengths(x: Any, has_holes: bool) -> tuple[Tensor, Tensor | None, int | None]:
    """cu_seqlens, seqused and max_seqlen, None where the tensor does not know it: to look would stall. Where rows are
    left out, as by `torch.nested.narrow`, the first ones may be among them: they are a sequence that uses none."""
    bounds = x.offsets().to(torch.int32)
    if not has_holes:
        return bounds, None, getattr(x, "_maybe_max_seqlen", None)
    used = bounds.diff() if x.lengths() is None else x.lengths().to(torch.int32)
    return functional.pad(bounds, (1, 0)), functional.pad(used, (1, 0)), None
