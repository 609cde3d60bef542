"""The exponential's polynomial: its error over all of its range, in the arithmetic the kernel uses."""

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.core.line import is_in_share
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


@pytest.mark.parametrize("share", range(17))
def test_share_of_pairs(share):
    chosen = [is_in_share(pair, share) for pair in range(64)]
    assert sum(chosen) == 4 * share
    gaps = np.diff([i for i, hit in enumerate(chosen) if hit])
    assert share < 2 or gaps.max() - gaps.min() <= 1  # spread evenly
