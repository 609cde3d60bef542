"""Ready-made score_mods: functions of (score, b, h, q_idx, kv_idx). Tensors that they are made of get gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from .mods.call import ScoreMod


def alibi(slopes: Tensor) -> ScoreMod:
    """A penalty that grows with the distance to the key. slopes: (heads_q,); see `alibi_slopes`.

    Source: Press, Smith, Lewis, "Train short, test long", arXiv 2108.12409.
    """

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + slopes[h] * (kv_idx - q_idx)

    return score_mod


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """(heads,) float32: 2^(-8 (h + 1) / heads)."""
    return torch.exp2(torch.arange(1, heads + 1, dtype=torch.float32, device=device) * (-8.0 / heads))


def relative_bias(table: Tensor) -> ScoreMod:
    """A learned bias for each head and distance. table: (heads_q, 2 * n + 1), for distances kv_idx - q_idx of -n to n;
    those beyond share the outermost entries."""
    reach = table.shape[1] // 2

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, (kv_idx - q_idx).clamp(-reach, reach) + reach]

    return score_mod


def bias(values: Tensor) -> ScoreMod:
    """A bias for each pair. values: (batch, heads_q, seqlen_q, seqlen_k); an axis of 1 is shared."""
    shared = [extent == 1 for extent in values.shape]
    own = values[tuple(0 if one else slice(None) for one in shared)]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        indices = tuple(i for one, i in zip(shared, (b, h, q_idx, kv_idx)) if not one)
        return score + own[indices] if indices else score + own

    return score_mod


def softcap(cap: float) -> ScoreMod:
    """cap * tanh(score / cap), as the argument softcap= does."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


def temperature(per_head: Tensor) -> ScoreMod:
    """Scores times a factor of each query head. per_head: (heads_q,)."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score * per_head[h]

    return score_mod
