"""score_mods and mask_mods of a call, each kind of `model`, with tensors of the call's sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fa4
from fa4.oracle.reference import Functions


@dataclass(frozen=True)
class Sizes:
    """Of a call. longest: rows of the longest sequence that it says there may be, which functions must serve."""

    batch: int
    heads: int
    queries: int
    keys: int
    longest: int

    @property
    def of_pairs(self) -> tuple[int, int, int, int]:
        """Of a tensor that has an entry for each pair, and no axis of 1, which `fa4.scores.bias` would share."""
        return max(self.batch, 2), max(self.heads, 2), max(self.queries, 2), max(self.keys, 2)


def _nonlinear(factor: Tensor) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: 2.0 * torch.tanh(score * factor[h]) + torch.sigmoid(score)


def _of_rows(rows: Tensor) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: score * (1.0 + 0.25 * rows[q_idx]) + rows[q_idx]


def _of_sequences(bias: Tensor) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: score + bias[b] * (kv_idx - q_idx) * 0.0625


def _number(temperature: Tensor) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: score / temperature.clamp(min=0.1) + (q_idx == kv_idx)


def _position_free() -> Callable:
    return lambda score, b, h, q_idx, kv_idx: score * torch.sigmoid(score) - 0.125 * score


def score(kind: str, sizes: Sizes, generator: torch.Generator, device: str) -> Functions:
    """The score_mod alone."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    made: dict[str, tuple[Callable, Callable[[], tuple[Tensor, ...]]]] = {
        "alibi": (fa4.scores.alibi, lambda: (normal(sizes.heads).abs() * 0.1,)),
        "relative_bias": (fa4.scores.relative_bias, lambda: (normal(sizes.heads, 33),)),
        "bias": (fa4.scores.bias, lambda: (normal(1, 1, *sizes.of_pairs[2:]),)),
        "bias_of_pairs": (fa4.scores.bias, lambda: (normal(*sizes.of_pairs),)),
        "nonlinear": (_nonlinear, lambda: (normal(sizes.heads),)),
        "of_rows": (_of_rows, lambda: (normal(max(sizes.longest, 1)),)),
        "of_sequences": (_of_sequences, lambda: (normal(max(sizes.batch, 1)),)),
        "number": (_number, lambda: (normal().abs() + 0.5,)),
        "position_free": (_position_free, tuple),
    }
    make, captured = made[kind]
    return Functions(make, captured=captured())


def compat_alibi(slopes: Tensor, softcap: float, offsets: Tensor) -> Functions:
    """What flash-attn does with alibi_slopes: distances are from the bottom-right diagonal, behind the softcap."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        return score - slopes[h] * (q_idx + offsets[b] - kv_idx).abs()

    return Functions(lambda: score_mod)


def mask(kind: str, sizes: Sizes, generator: torch.Generator, device: str) -> Callable:
    """A mask_mod."""

    def numbers(top: int, *shape: int) -> Tensor:
        return torch.randint(0, max(top, 1), shape, generator=generator).to(device)

    batch, longest = max(sizes.batch, 1), max(sizes.longest, 1)
    if kind == "prefix":
        return fa4.masks.prefix(numbers(sizes.keys, batch))
    if kind == "documents":
        return fa4.masks.documents(numbers(3, batch, longest).sort(dim=1).values)
    if kind == "heads":
        reach = int(numbers(max(sizes.keys // 2, 1), 1))
        return lambda b, h, q_idx, kv_idx: kv_idx - q_idx <= reach * (h + 1)
    if kind == "empty_rows":
        hidden = numbers(3, longest) == 0
        return lambda b, h, q_idx, kv_idx: ~hidden[q_idx] & (kv_idx % 5 != 1)
    if kind == "columns":
        start = numbers(sizes.queries, batch, sizes.heads, max(sizes.keys, 1))
        return fa4.masks.columns(start, start + numbers(40, *start.shape))
    if kind == "dilated":
        return fa4.masks.dilated(int(numbers(30, 1)), 1 + int(numbers(4, 1)))
    window = fa4.masks.sliding_window(int(numbers(90, 1)))
    if kind == "both":  # both have `of_ranges`
        return fa4.masks.both(window, mask("columns", sizes, generator, device))
    if kind == "either":  # one has none
        return fa4.masks.either(window, mask("dilated", sizes, generator, device))
    raise KeyError(kind)


OF_HEADS = "heads", "columns", "both"  # masks that differ from head to head
_BLOCK_SIZES: dict[str, Any] = {"128": 128, "64": 64, "128x64": (128, 64), "heads": 128}


def block_mask(kind: str, mask_mod: Callable, of_heads: bool, sizes: Sizes, device: str) -> Any:
    """The block mask of a mask_mod, which has lists of each head its own if `kind` or the mask itself says so."""
    heads = sizes.heads if of_heads or kind == "heads" else None
    shape = sizes.batch, heads, sizes.queries, sizes.keys
    return fa4.create_block_mask(mask_mod, *shape, device=device, BLOCK_SIZE=_BLOCK_SIZES[kind])
