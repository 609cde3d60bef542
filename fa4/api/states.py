"""Merging of partial attention results: ring attention, shared prefixes, cascades."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..runtime.spec import compute_dtype
from ..torch_ops.checks import check_dtype, check_plain


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention over the union of disjoint key sets, from the results over each set.

    With lse_i the log-sum-exp of a row's logits over set i, and out_i the normalised output:

            lse = log(sum_i exp(lse_i)),   out = sum_i exp(lse_i - lse) out_i

    in float32 (float64 for float64). Differentiable in all arguments. A state without a key for a row (lse -inf) has no
    effect on it, whatever its out holds, NaN included; a row with keys in one state only is returned bit for bit. At
    most one of the states may include the sink.

    Args:
        outs: each (batch, seqlen_q, heads, head_dim_v), or packed (total_q, heads, head_dim_v); of one dtype.
        lses: each (batch, heads, seqlen_q), or packed (heads, total_q); float32, or float64 to go with float64.

    Returns:
        out in the outs' dtype, and lse in the lses'.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: the numbers of states differ or are 0, or a state has another shape or device than the first.
    """
    _check(outs, lses)
    lse = torch.stack(tuple(lses))
    # The largest lse cancels, so it needs no derivative.
    lse_max = lse.detach().amax(dim=0)
    lse_max = lse_max.masked_fill(lse_max == -torch.inf, 0.0)
    has_keys = lse != -torch.inf
    weights = torch.where(has_keys, torch.exp(torch.where(has_keys, lse, lse_max) - lse_max), 0.0)
    total = weights.sum(dim=0)
    is_empty = total == 0.0
    total = total.masked_fill(is_empty, 1.0)
    weights = weights / total
    merged = torch.zeros_like(outs[0], dtype=lse.dtype)
    for out, weight, row_has_keys in zip(outs, weights, has_keys):
        rows, row_has_keys = (x.transpose(-1, -2)[..., None] for x in (weight, row_has_keys))
        merged = merged + rows * torch.where(row_has_keys, out.to(lse.dtype), 0.0)
    return merged.to(outs[0].dtype), (lse_max + total.log()).masked_fill(is_empty, -torch.inf)


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> None:
    for name, states in (("outs", outs), ("lses", lses)):
        if not isinstance(states, (list, tuple)):
            raise TypeError(f"{name} is a {type(states).__name__}, expected a list of tensors, one of each state")
    if len(outs) != len(lses) or not outs:
        raise ValueError(f"there are {len(outs)} outs and {len(lses)} lses, expected one of each for every state")
    first = outs[0]
    check_plain("outs[0]", first, first)
    check_dtype("outs[0]", first)
    if first.ndim not in (3, 4):
        raise ValueError(
            f"outs[0] has shape {tuple(first.shape)}, expected (batch, seqlen_q, heads, head_dim_v), or packed "
            "(total_q, heads, head_dim_v)"
        )
    *batch, rows, heads, _ = first.shape
    expected = {"outs": (tuple(first.shape), first.dtype), "lses": ((*batch, heads, rows), compute_dtype(first.dtype))}
    for name, states in (("outs", outs), ("lses", lses)):
        shape, dtype = expected[name]
        for i, x in enumerate(states):
            check_plain(f"{name}[{i}]", x, first, like="outs[0]")
            if tuple(x.shape) != shape:
                raise ValueError(f"{name}[{i}] has shape {tuple(x.shape)}, expected {shape} to go with outs[0]")
            if x.dtype != dtype:
                raise TypeError(f"{name}[{i}] has dtype {x.dtype}, expected {dtype}")
