"""Masks and scores as callers write them for torch's flex_attention, each with a reason; and torch's own answer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import math_attention

from fa4 import masks, scores

BATCH, HEADS, QUERIES, KEYS = 2, 4, 70, 90


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def _documents(length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 4, (BATCH, length), generator=generator).sort(dim=1).values


def _tree() -> tuple[Tensor, Tensor]:
    """Node i hangs on node (i - 1) // 2; when a walk enters and leaves each."""
    parents = [(i - 1) // 2 for i in range(KEYS)]
    first, last, clock = [0] * KEYS, [0] * KEYS, 0

    def walk(node: int) -> None:
        nonlocal clock
        first[node], clock = clock, clock + 1
        for child in range(1, KEYS):
            if parents[child] == node:
                walk(child)
        last[node], clock = clock, clock + 1

    walk(0)
    return torch.tensor(first), torch.tensor(last)


def _bidirectional_prefix_of_images(b, h, q_idx, kv_idx):
    """Python operators, a nested index and a chain of comparisons of several kinds."""
    kind = _KINDS[b][q_idx]
    return ((kind == 1) & (_KINDS[b][kv_idx] == 1)) | ((q_idx >= kv_idx) & ~(kind == 2))


_KINDS = (torch.arange(KEYS) // 7 % 3).expand(BATCH, KEYS).contiguous()

MASKS: dict[str, Callable] = {
    "causal": masks.causal,
    "sliding_window": masks.sliding_window(17),
    "prefix": masks.prefix(torch.tensor([20, 0])),
    "documents": masks.documents(_documents(QUERIES), _documents(KEYS)),
    "dilated": masks.dilated(9, 4),
    "tree": masks.tree(*_tree()),
    "columns": masks.columns(
        torch.randint(0, 40, (BATCH, HEADS, KEYS), generator=torch.Generator().manual_seed(1)),
        torch.randint(40, 70, (BATCH, HEADS, KEYS), generator=torch.Generator().manual_seed(2)),
    ),
    "both": masks.both(masks.causal, masks.documents(_documents(KEYS))),
    "either": masks.either(masks.sliding_window(3), lambda b, h, q_idx, kv_idx: kv_idx < 2),
    "heads_differ": lambda b, h, q_idx, kv_idx: q_idx - kv_idx >= h * 10,
    "images": _bidirectional_prefix_of_images,
    "nothing": lambda b, h, q_idx, kv_idx: kv_idx < -1,
    "natten": lambda b, h, q_idx, kv_idx: (
        ((q_idx // 10 - kv_idx // 10).abs() <= 2) & ((q_idx % 10 - kv_idx % 10).abs() <= 3)
    ),
}


@dataclass(frozen=True)
class Score:
    """A score_mod made of tensors, which get gradients."""

    make: Callable[..., Callable]
    tensors: tuple[Tensor, ...] = ()

    def of(self, dtype: torch.dtype) -> tuple[Callable, list[Tensor]]:
        leaves = [x.to(dtype).requires_grad_() for x in self.tensors]
        return self.make(*leaves), leaves


def _in_place(factor):
    def score_mod(score, b, h, q_idx, kv_idx):
        score = score * 0.5
        score += factor[b, h] * q_idx
        return torch.sigmoid(score) - torch.exp2(-(h + 1.0))

    return score_mod


def _masked_inside(bias):
    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx + 20 >= kv_idx, score * 2 + bias[kv_idx], -float("inf"))

    return score_mod


def _shared_temperature(temperature):
    return lambda score, b, h, q_idx, kv_idx: score / temperature.clamp(min=0.1) + (q_idx == kv_idx)


def _quadratic(a):
    # The root stays away from 0, where its derivative has no bound and rounding alone decides the gradients.
    def score_mod(score, b, h, q_idx, kv_idx):
        return score**2 * a[h] - (torch.abs(score) + 0.25).sqrt() + torch.log(score.abs() + 1.5)

    return score_mod


def _kerple(a, b):
    """Source: Chi et al., "KERPLE", arXiv 2205.09921."""
    return lambda score, _, h, q_idx, kv_idx: score - a[h] * torch.log1p(b[h].abs() * (q_idx - kv_idx).abs())


def _angles(weight):
    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.atan2(score * weight[h], (q_idx - kv_idx) * 0.125 + 0.0625) + torch.atan(score)

    return score_mod


def _made_inside(score, b, h, q_idx, kv_idx):
    """Ranges, one of them counted from the end, and numbers as tensors."""
    distance = torch.arange(0.5, 60, 0.5)[kv_idx] + torch.arange(end=QUERIES, dtype=torch.float32)[q_idx // 2 - 35]
    numbers = torch.zeros(()) + torch.full((), 0.25) * torch.scalar_tensor(2.0) + torch.ones((), dtype=torch.int64)
    return score * numbers + distance * 0.125 + torch.arange(3)[2]


def _changed_in_place(weight):
    def score_mod(score, b, h, q_idx, kv_idx):
        factor = weight[h]
        factor.mul_(0.5)
        score.add_(factor).mul_(2)
        score -= kv_idx * 0.125
        return score

    return score_mod


SCORES: dict[str, Score] = {
    "alibi": Score(scores.alibi, (_normal(HEADS),)),
    "relative_bias": Score(scores.relative_bias, (_normal(HEADS, 21),)),
    "bias": Score(scores.bias, (_normal(BATCH, 1, QUERIES, KEYS),)),
    "softcap": Score(lambda: scores.softcap(1.5)),
    "temperature": Score(scores.temperature, (_normal(HEADS),)),
    "in_place": Score(_in_place, (_normal(BATCH, HEADS),)),
    "masked_inside": Score(_masked_inside, (_normal(KEYS),)),
    "a_number_is_learned": Score(_shared_temperature, (torch.tensor(1.7, dtype=torch.float64),)),
    "quadratic": Score(_quadratic, (_normal(HEADS),)),
    "kerple": Score(_kerple, (_normal(HEADS), _normal(HEADS))),
    "angles": Score(_angles, (_normal(HEADS),)),
    "made_inside": Score(lambda: _made_inside),
    "changed_in_place": Score(_changed_in_place, (_normal(HEADS),)),
    "constant": Score(lambda: lambda score, b, h, q_idx, kv_idx: score * torch.zeros_like(score) + kv_idx * 0.125),
}


def everything_visible(b, h, q_idx, kv_idx):
    return q_idx >= 0


def score_as_it_is(score, b, h, q_idx, kv_idx):
    return score


def torchs_answer(q, k, v, score_mod=None, mask_mod=None, scale=None) -> tuple[Tensor, Tensor]:
    """(out, lse) of torch's flex_attention as it runs without a compiler; (batch, heads, rows, dim). Differentiable."""
    arguments = score_mod or score_as_it_is, (mask_mod or everything_visible,), scale or q.shape[-1] ** -0.5
    out, lse_log2, *_ = math_attention(q, k, v, *arguments, {})
    return out, lse_log2 * torch.log(torch.tensor(2.0, dtype=lse_log2.dtype))


normal = functools.cache(_normal)
