"""The exponential's polynomial and line: their errors over all of their range, in the arithmetic the kernel uses."""

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.core.line import is_in_share
from fa4.runtime.spec import LINE_SHIFT
from fa4.sm100.exp2 import COEFFICIENTS


def polynomial(fraction: np.ndarray) -> np.ndarray:
    """Horner's rule with one rounding a step, as fma.rn.f32 does it."""
    *rest, last = (np.float32(c) for c in COEFFICIENTS)
    value = np.full_like(fraction, last)
    for coefficient in reversed(rest):
        # The product of two floats and its sum with a third are exact enough in float64 to round once.
        value = (value.astype(np.float64) * fraction + np.float64(coefficient)).astype(np.float32)
    return value


def test_error_on_every_fraction():
    # Every float32 in [0.5, 1) and a dense net of those below.
    upper = np.arange(0x3F000000, 0x3F800000, dtype=np.uint32).view(np.float32)
    lower = np.linspace(0.0, 0.5, 1 << 20, dtype=np.float32)
    for fraction in (lower, upper):
        exact = np.exp2(fraction.astype(np.float64))
        assert np.abs(polynomial(fraction) / exact - 1).max() <= 1.45e-7


def test_error_of_the_line():
    """The bits of a float16 number are a fixed-point number in steps of 1/64, see `core.line`."""
    x = np.linspace(-13.0, 8.75, 1 << 20)
    fixed = np.rint((x + 15 + LINE_SHIFT) * 64).astype(np.uint16)
    quotient = (fixed << 4).view(np.float16) / np.exp2(x)
    assert quotient.min() >= 1 - 0.045 and quotient.max() <= 1 + 0.026  # of the line alone -0.039 and 0.020
    assert abs(quotient[x < 8].mean() - 1) < 1e-3


@pytest.mark.parametrize("share", range(17))
def test_share_of_pairs(share):
    chosen = [is_in_share(pair, share) for pair in range(64)]
    assert sum(chosen) == 4 * share
    gaps = np.diff([i for i, hit in enumerate(chosen) if hit])
    assert share < 2 or gaps.max() - gaps.min() <= 1  # spread evenly
