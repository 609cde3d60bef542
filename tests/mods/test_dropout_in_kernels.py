"""Dropout in the kernels of every chip, on emulated ones."""

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from fa4.emulator import emulate
from tests.dropout import (
    DENSE,
    PACKED,
    PADDED_HEADS,
    WIDE,
    WIDE_IN_ORDER,
    WIDE_KEYS,
    assert_bits,
    assert_right_with_dropout,
)

pytestmark = pytest.mark.rotates(6)

CHIPS = {"sm80": "sm_80", "sm90": "sm_90a", "sm100": "sm_100a"}
HOPPERS = (WIDE, WIDE_IN_ORDER, WIDE_KEYS)
SOAK_ONLY = (DENSE, WIDE_IN_ORDER, WIDE_KEYS)


def _results():
    for backend in CHIPS:
        for case in (PACKED, PADDED_HEADS, DENSE, *(HOPPERS if backend == "sm90" else ())):
            marks = [pytest.mark.soak] * (case in SOAK_ONLY)
            yield pytest.param(backend, case, marks=marks, id=f"{backend}-{case}")


@pytest.mark.parametrize("backend", CHIPS)
def test_bits(backend, seed):
    with emulate(CHIPS[backend], seed=seed):
        assert_bits(seed, backend)


@pytest.mark.parametrize(("backend", "case"), list(_results()))
def test_results(backend, case, seed):
    with emulate(CHIPS[backend], seed=seed):
        assert_right_with_dropout(case, seed, backend)
