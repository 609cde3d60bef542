"""Scores of a tile, which both directions compute."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mods.graph import Evaluation
from .band import Band
from .modified import Masked, Modified
from .passes import Pass
from .products import product


def scores(
    q: Tensor,
    k: Tensor,
    part: Pass,
    modified: Modified | None,
    mask: Band | Masked,
    q_rows: range,
    k_rows: range,
) -> tuple[Tensor, Evaluation | None]:
    """S of one tile, after softcap or score_mod, masked: (heads, group * queries, keys); and the score's evaluation."""
    # Scaled in a step of its own: a BLAS may fold alpha into an operand, which rounds every term once more.
    s, done = product(q, k.transpose(1, 2)).mul_(part.spec.softmax_scale), None
    if part.spec.softcap > 0:
        s.div_(part.spec.softcap).tanh_().mul_(part.spec.softcap)
    if modified is not None and modified.mods.score:
        done = modified.score(part, s, q_rows, k_rows)
        # A copy: the derivative needs what the graph knows.
        s = torch.broadcast_to(done.value(done.graph.result), part.by_head(s).shape).clone().view(s.shape)
    mask.hide(part.by_head(s), q_rows, k_rows)
    return s, done


def finite_or_zero(x: Tensor) -> Tensor:
    return x.masked_fill(torch.isneginf(x), 0.0)
