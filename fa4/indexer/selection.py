"""Exact top-k of rows of scores by torch, for any device.

The order of scores is total, so that results repeat: larger scores first, of equal ones the smaller index. -0.0 equals
0.0 (a sum of negative weights times zeros). NaN comes before all numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def order_keys(scores: Tensor) -> Tensor:
    """Return signed integers in the order of the scores, as wide as these."""
    kind = _INTEGERS[scores.dtype]
    bits = (scores + 0.0).view(kind)  # -0.0 + 0.0 is 0.0
    largest = torch.iinfo(kind).max
    return torch.where(bits < 0, bits ^ largest, bits).masked_fill(scores.isnan(), largest)


def select(scores: Tensor, counts: Tensor, indices: Tensor) -> None:
    """Write the indices of the largest of the first counts[t] scores of each row t: ascending, then -1. Other scores
    may be anything. indices: (rows, topk) int32."""
    columns, topk = scores.shape[1], indices.shape[1]
    indices.fill_(-1)
    if not topk or not scores.numel():
        return
    positions = torch.arange(columns, dtype=torch.int32, device=scores.device)
    is_visible = positions < counts[:, None]
    keys = order_keys(scores).masked_fill(~is_visible, torch.iinfo(_INTEGERS[scores.dtype]).min)
    kept = min(topk, columns)
    least = keys.topk(kept, sorted=True).values[:, -1:]
    above, equal = keys > least, keys == least
    is_chosen = (above | (equal & (equal.cumsum(-1) <= kept - above.sum(-1, keepdim=True)))) & is_visible
    row, column = is_chosen.nonzero(as_tuple=True)
    slot = is_chosen.cumsum(-1)[row, column] - 1
    indices[row, slot] = column.int()


def gather(scores: Tensor, indices: Tensor) -> Tensor:
    """Return the scores at `indices`, (rows, topk); -inf where these are -1."""
    if not scores.shape[1]:
        return scores.new_full(indices.shape, -torch.inf)
    return scores.gather(1, indices.clamp(min=0).long()).masked_fill(indices < 0, -torch.inf)
