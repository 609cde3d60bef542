"""What happens to a raw score q.k before it becomes a logit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import cutlass.cute as cute
from cutlass import Float32

from .softmax import LOG2_E


class Score(Protocol):
    """A function of raw scores and its derivative; kernels leave out both where there is none (None)."""

    def apply(self, score: Float32) -> Float32:
        """What softmax scales to give the logit."""

    def slope(self, applied: Float32) -> Float32:
        """d logit / d (softmax_scale * score), from what `apply` returned."""


@dataclass(frozen=True)
class Softcap:
    """logit = softcap * tanh(softmax_scale * score / softcap); `apply` gives the tanh.

    scale_over_cap: softmax_scale / softcap.
    """

    scale_over_cap: Float32

    def apply(self, score: Float32) -> Float32:
        return tanh_of(score * (self.scale_over_cap * (2.0 * LOG2_E)))

    def slope(self, applied: Float32) -> Float32:
        return 1.0 - applied * applied


def tanh_of(log2_exp_2x: Float32) -> Float32:
    """tanh(x) from 2x * log2(e), as 1 - 2 / (exp(2x) + 1): the hardware's tanh.approx would cost accuracy where the
    result is multiplied, as by softcap's cap."""
    return 1.0 - 2.0 * cute.arch.rcp_approx(cute.math.exp2(log2_exp_2x, fastmath=True) + 1.0)


def apply(score: Score | None, scores: cute.Tensor) -> None:
    """Apply it to every element of a register tensor, in place."""
    if score is not None:
        for i in range(cute.size(scores)):
            scores[i] = score.apply(scores[i])
