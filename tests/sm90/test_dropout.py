"""Dropout in the Hopper kernels on the emulated chip."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("fa4.emulator.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from fa4.emulator import emulate
from tests.dropout import DENSE, PACKED, WIDE, WIDE_KEYS, assert_bits, assert_right_with_dropout


def test_bits(seed):
    with emulate("sm_90a", sms=4, seed=seed):
        assert_bits(seed, "sm90")


@pytest.mark.parametrize(
    "case", [PACKED, WIDE, *(pytest.param(case, marks=pytest.mark.soak) for case in (DENSE, WIDE_KEYS))], ids=str
)
def test_results(case, seed):
    with emulate("sm_90a", sms=4, seed=seed):
        assert_right_with_dropout(case, seed, "sm90")
