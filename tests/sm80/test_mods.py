"""Traced scores and masks, and block masks, in the portable kernels on the emulated chip."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("fa4.emulator.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from fa4 import jit
from fa4.emulator import emulate
from tests.mods.kernels import problems, published_problems
from tests.mods.oracle import assert_kernel_is_right, sums_of_dq
from tests.mods.published import NAMES


# Lists of blocks, of each head its own, are below; documents in lists are the other chips', and the soak's here.
@pytest.mark.parametrize("name", ["many_kinds_in_order", pytest.param("documents_short", marks=pytest.mark.soak)])
def test_forward_and_gradients(name, seed):
    problem = problems()[name]
    with emulate("sm_80", seed=seed):
        assert_kernel_is_right(problem, seed, "sm80")


@pytest.mark.parametrize("name", ["packed_and_split", "other_blocks"])
def test_forward(name, seed):
    problem = problems()[name]
    with emulate("sm_80", seed=seed):
        assert_kernel_is_right(problem, seed, "sm80", gradients=False)


def test_other_values_numbers_lengths_and_lists_compile_nothing(seed):
    with emulate("sm_80", seed=seed):
        assert_kernel_is_right(problems()["heads_far"], seed, "sm80")
        compiled = set(jit._launchers)
        assert_kernel_is_right(problems()["heads_near"], seed, "sm80")
    assert set(jit._launchers) == compiled


def test_blocks_of_keys_add_in_the_order_of_their_numbers(seed):
    assert len(sums_of_dq(problems()["heads_far"], seed, "sm80", "sm_80")) == 1, f"seed {seed}"


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_what_attention_gym_publishes(name, seed):
    problem = published_problems()[name]
    with emulate("sm_80", seed=seed):
        assert_kernel_is_right(problem, seed, "sm80")
