"""Scores of a tile, for the forward and the backward."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mods.ir.graph import Evaluation
from .band import Band
from .modified import ModifiedCall, ModifiedMask
from .passes import Pass
from .products import product


def scores(
    q: Tensor,
    k: Tensor,
    part: Pass,
    modified: ModifiedCall | None,
    mask: Band | ModifiedMask,
    q_rows: range,
    k_rows: range,
) -> tuple[Tensor, Evaluation | None]:
    """Return masked S of one tile after softcap or score_mod, (heads, group * queries, keys), and the evaluation of the
    score_mod or None."""
    # Scale in a separate step: a BLAS may multiply an operand by alpha, which rounds every term once more.
    s, evaluated = product(q, k.transpose(1, 2)).mul_(part.spec.softmax_scale), None
    if part.spec.softcap > 0:
        s.div_(part.spec.softcap).tanh_().mul_(part.spec.softcap)
    if modified is not None and modified.mods.score:
        evaluated = modified.score(part, s, q_rows, k_rows)
        # A copy: the mask is applied in place, and the derivative needs the unmasked values of the graph.
        s = torch.broadcast_to(evaluated.value(evaluated.graph.result), part.by_head(s).shape).clone().view(s.shape)
    mask.apply_mask(part.by_head(s), q_rows, k_rows)
    return s, evaluated


def finite_or_zero(x: Tensor) -> Tensor:
    return x.masked_fill(torch.isneginf(x), 0.0)
