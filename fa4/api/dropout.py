"""Attention dropout's keep mask in torch, for inspection."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mods.ir import dropout
from ..mods.ir.ready import check_whole
from ..torch_ops import checks


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
    """Return the pairs that `flash_attn_func(..., dropout_p=dropout_p, dropout_seed=dropout_seed)` keeps, with any
    backend.

    `fa4.mods.ir.dropout` defines them and the factor on kept probabilities. This allocates memory for all pairs. For
    packed sequences, b is the sequence's index and positions count from its first row. For nested tensors with holes
    (those with lengths, as from `torch.nested.narrow`) b is the index plus 1: use the mask of batch + 1 sequences,
    without the first.

    Returns:
        bool (batch, heads, seqlen_q, seqlen_k); heads are query heads.

    Raises:
        TypeError, ValueError: dropout_p, dropout_seed or a size is invalid.
    """
    sizes = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    for name, size in sizes.items():
        check_whole(name, size, 0)
    device = torch.empty(0, device=device).device  # with its index
    dropout_p = checks.probability("dropout_p", dropout_p)
    if not dropout_p:
        return torch.ones(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    seed = checks.seed("dropout_seed", dropout_seed, device)
    pair = torch.arange(batch * heads, device=device).view(batch, heads, 1)
    return dropout.keep(dropout_p, seed, pair, torch.arange(seqlen_q, device=device), range(seqlen_k))
