"""The wide backward on rows of 64k keys and more, whose weights are below the smallest normal number of float16."""

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from fa4.sm90.bwd.wide.config import WEIGHT_EXPONENT
from fa4.sm90.plan import Plan
from tests.emulated import Kernels
from tests.long_rows import CASES

SM90 = Kernels("sm90", "sm_90a", Plan)
SOON = ("share_1024k", "share_64k")


@pytest.mark.parametrize(
    "name", [name if name in SOON else pytest.param(name, marks=pytest.mark.soak) for name in CASES]
)
def test_gradients_of_small_weights(name, seed):
    pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a compiler")
    rows = CASES[name]
    problem, saved = rows.make(seed)
    rows.assert_right(problem, saved, SM90.gradients(problem, seed, saved=saved), f"seed {seed}")


@pytest.mark.parametrize("keys", [1, 1 << 16, 1 << 18, 1 << 20, 1 << 28])
def test_weights_of_any_row_keep_the_digits_of_float16(keys, seed):
    """Of 1 / keys and what is up to 2^9 times larger; also the largest there is, 1 and a rounding error."""
    p = torch.rand(1000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(9).exp2() / keys
    p = torch.cat((p.clamp(max=1.0), torch.tensor([min(1.0, 512 / keys) * 1.001])))
    passed = (p * 2**WEIGHT_EXPONENT).half().double() / 2**WEIGHT_EXPONENT
    assert ((passed - p).abs() <= 2.0**-11 * p).all()
