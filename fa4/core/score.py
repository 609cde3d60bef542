"""What happens to a raw score q.k before it becomes a logit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .softmax import LOG2_E
from .vec_io import bits


@dataclass(frozen=True)
class Softcap:
    """logit = softcap * tanh(softmax_scale * score / softcap); `apply` gives the tanh.

    scale_over_cap: softmax_scale / softcap.
    """

    scale_over_cap: Float32

    def apply(self, scores: cute.Tensor) -> None:
        """To scores in registers, in place, by a whole warp. lse shows logits in float32, and most are far smaller than
        the cap: `tanh_by_exp`, which errs 1e-7 of the cap, would not do."""
        _tanh_in_place(scores, self.scale_over_cap)


@dataclass(frozen=True)
class SoftcapAgain:
    """The same in a backward, of one score: its logit serves a weight of 16 bits alone, so `tanh_by_exp` will do."""

    scale_over_cap: Float32

    def apply(self, score: Float32) -> Float32:
        return tanh_by_exp(score * (self.scale_over_cap * (2.0 * LOG2_E)))

    def slope(self, applied: Float32) -> Float32:
        """d logit / d (softmax_scale * score), from what `apply` returned."""
        return 1.0 - applied * applied


def tanh_by_exp(log2_exp_2x: Float32) -> Float32:
    """tanh(x) from 2x * log2(e), as 1 - 2 / (exp(2x) + 1), which errs 1e-7 also where the result is small. tanh.approx
    would err 2^-11 of the result."""
    return 1.0 - 2.0 * cute.arch.rcp_approx(cute.math.exp2(log2_exp_2x, fastmath=True) + 1.0)


# tanh(x) for |x| < 1/2 from y = TIMES x: y times a polynomial in y * y, a minimax fit that is 1.5e-8 off at most.
TIMES = 4.0
_SMALL = (0.25, -5.2083037e-3, 1.3013554e-4, -3.23764e-6, 6.577105e-8)
_TWO_OR_MORE = 1 << 30  # the bit of a float32 that is set if it is at least 2, or no number


@cute.jit
def _tanh_in_place(scores: cute.Tensor, scale: Float32):
    """tanh(scale * score), 3e-7 of it off at most: by a polynomial, for which it must be less than 1/2, or by the
    exponential. Nearly always a warp has none that is not; what a score gives does not depend on that."""
    if cute.arch.vote_any_sync((_scaled(scores, scale * TIMES) & _TWO_OR_MORE) != 0):
        _replace(scores, tanh_of)
    else:
        _replace(scores, _small_tanh)


def _scaled(scores: cute.Tensor, scale: Float32) -> Int32:
    """Scale them in place; the bits that any of them has."""
    found = Int32(0)
    for i in range(cute.size(scores)):
        scores[i] = scores[i] * scale
        found = found | bits(scores[i])
    return found


def _replace(scores: cute.Tensor, function: Callable[[Float32], Float32]) -> None:
    for i in range(cute.size(scores)):
        scores[i] = function(scores[i])


def _small_tanh(y: Float32) -> Float32:
    square, total = y * y, Float32(_SMALL[-1])
    for coefficient in reversed(_SMALL[:-1]):
        total = total * square + coefficient
    return y * total


def tanh_of(y: Float32) -> Float32:
    """tanh(x) from y = TIMES x, 3e-7 of it off at most."""
    return Float32(cutlass.select_(y * y < 4.0, _small_tanh(y), tanh_by_exp(y * (2.0 * LOG2_E / TIMES))))
