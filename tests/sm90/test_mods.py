"""Traced scores and masks, and block masks, in the Hopper kernels on the emulated chip."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("fa4.emulator.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from fa4.emulator import emulate
from tests.mods.kernels import problems, published_problems
from tests.mods.oracle import assert_kernel_is_right
from tests.mods.published import NAMES


# Steps in order, which keep scores; the same by lists; steps that overlap, by lists and not.
@pytest.mark.parametrize("name", ["many_kinds", "documents", "heads_wide", "divides"])
def test_forward_and_gradients(name, seed):
    problem = problems()[name]
    with emulate("sm_90a", sms=4, seed=seed):
        assert_kernel_is_right(problem, seed, "sm90")


# Scores by lists are in "documents", each head's own lists in "heads_wide".
@pytest.mark.parametrize("name", ["packed_and_split", pytest.param("heads", marks=pytest.mark.soak)])
def test_forward(name, seed):
    problem = problems()[name]
    with emulate("sm_90a", sms=2, seed=seed):
        assert_kernel_is_right(problem, seed, "sm90", gradients=False)


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_what_attention_gym_publishes(name, seed):
    problem = published_problems()[name]
    with emulate("sm_90a", seed=seed, sms=2):
        assert_kernel_is_right(problem, seed, "sm90")
