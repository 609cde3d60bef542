"""Attention dropout's keep bits in torch, for whoever wants to see them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .mods import dropout


def dropout_mask(
    dropout_p: float,
    dropout_seed: checks.Seed,
    *,
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Which pairs `flash_attn_func(..., dropout_p=dropout_p, dropout_seed=dropout_seed)` keeps, whatever its backend.

    `fa4.mods.dropout` defines them, and what those that are kept are multiplied by. This takes memory for all pairs.
    Of packed sequences b is the sequence's number, and places count from its first row.

    Returns:
        bool (batch, heads, seqlen_q, seqlen_k); heads are those of queries.

    Raises:
        TypeError, ValueError: dropout_p or dropout_seed is none.
    """
    device = torch.empty(0, device=device).device  # with its number
    dropout_p = checks.probability("dropout_p", dropout_p)
    if not dropout_p:
        return torch.ones(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    seed = checks.seed("dropout_seed", dropout_seed, device)
    pair = torch.arange(batch * heads, device=device).view(batch, heads, 1)
    return dropout.keep(dropout_p, seed, pair, torch.arange(seqlen_q, device=device), range(seqlen_k))
