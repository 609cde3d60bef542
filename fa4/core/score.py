"""Softcap: logit = softcap * tanh(softmax_scale * score / softcap) of a raw score q.k.

scale_over_cap: softmax_scale / softcap. The softcap itself is a factor of the exponent's scale.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .softmax import LOG2_E
from .vec_io import bits


def tanh_by_exp(log2_exp_2x: Float32) -> Float32:
    """tanh(x) from 2x * log2(e), as 1 - 2 / (exp(2x) + 1): absolute error 1e-7, also for small results. tanh.approx has
    a relative error of 2^-11."""
    return 1.0 - 2.0 * cute.arch.rcp_approx(cute.math.exp2(log2_exp_2x, fastmath=True) + 1.0)


# tanh(x) for |x| < 1/2 from y = TIMES x: y times a polynomial in y * y. Minimax fit, maximum error 1.5e-8.
TIMES = 4.0
_SMALL = (0.25, -5.2083037e-3, 1.3013554e-4, -3.23764e-6, 6.577105e-8)
_TWO_OR_MORE = 1 << 30  # the bit of a float32 that is set if its magnitude is at least 2 or it is NaN


@cute.jit
def apply_softcap(scores: cute.Tensor, scale_over_cap: Float32):
    """Whole warp: apply tanh(scale_over_cap * score) in place to scores in registers, relative error at most 3e-7: a
    polynomial for results of values below 1/2, else the exponential. Warps with small values only, the usual case,
    compute only the polynomial; the results are the same. lse is float32, and most logits are far smaller than the cap:
    `tanh_by_exp` alone, with an error of 1e-7 of the cap, is not accurate enough."""
    if cute.arch.vote_any_sync((_scaled(scores, scale_over_cap * TIMES) & _TWO_OR_MORE) != 0):
        _replace(scores, tanh_of)
    else:
        _replace(scores, _small_tanh)


def _scaled(scores: cute.Tensor, scale: Float32) -> Int32:
    """Scale in place; return the bitwise OR of all results."""
    any_bits = Int32(0)
    for i in range(cute.size(scores)):
        scores[i] = scores[i] * scale
        any_bits = any_bits | bits(scores[i])
    return any_bits


def _replace(scores: cute.Tensor, function: Callable[[Float32], Float32]) -> None:
    for i in range(cute.size(scores)):
        scores[i] = function(scores[i])


def _small_tanh(y: Float32) -> Float32:
    square, poly = y * y, Float32(_SMALL[-1])
    for coefficient in reversed(_SMALL[:-1]):
        poly = poly * square + coefficient
    return y * poly


def tanh_of(y: Float32) -> Float32:
    """tanh(x) from y = TIMES x, relative error at most 3e-7."""
    return Float32(cutlass.select_(y * y < 4.0, _small_tanh(y), tanh_by_exp(y * (2.0 * LOG2_E / TIMES))))
