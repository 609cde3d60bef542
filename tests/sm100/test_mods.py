"""Traced scores and masks, and block masks, in the Blackwell kernels on the emulated chip."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("fa4.emulator.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from fa4.emulator import emulate
from tests.mods.kernels import problems, published_problems
from tests.mods.oracle import assert_kernel_is_right
from tests.mods.published import NAMES


# Scores that are kept; by lists; a pair of CTAs, whose order of additions is held; keys in parts, and rows of a tile
# that are no head's. Each head's own lists, and rows of blocks without a key, are walked by code that Hopper's and the
# portable kernels show: the soak runs them here.
@pytest.mark.parametrize(
    "name", ["many_kinds", "documents", "divides", "packed_and_split", pytest.param("heads", marks=pytest.mark.soak)]
)
def test_forward_and_gradients(name, seed):
    problem = problems()[name]
    with emulate("sm_100a", sms=4, seed=seed):
        assert_kernel_is_right(problem, seed, "sm100")


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_what_attention_gym_publishes(name, seed):
    problem = published_problems()[name]
    with emulate("sm_100a", seed=seed, sms=2):
        assert_kernel_is_right(problem, seed, "sm100")
