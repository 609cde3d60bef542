"""Pairs of CUDA C++ kernels (`warpcheck_cases.pairs`): nothing is told of the right one, the fault of the other is."""

import pytest
from warpcheck.findings import Severity
from warpcheck_cases.pairs import Pair, emulated, pairs, told

ORDERS = 30
# Faults that are not told, and why.
MISSED = {
    "addresses.into_the_next": "both arrays belong to the CTA, and a barrier orders the writes",
    "addresses.global_unset": "arrays of the host count as written",
    "async_copies.matrix_of_lanes": "ldmatrix comes after the stores of its warp",
    "barriers.half_mask": "a bar.warp.sync of some lanes counts for the whole warp",
    "shared_memory.warp_sum": "volatile accesses are strong, and no data race by the ISA; lanes run together",
    "wgmma.operands_unready": "a product comes after all four warps of its warpgroup",
}
EVERY = pytest.mark.parametrize("pair", pairs(), ids=lambda pair: pair.id)
pytestmark = pytest.mark.usefixtures("nvrtc")


@EVERY
def test_nothing_is_told_of_the_right_kernel(pair: Pair, seed: int) -> None:
    gpu = emulated(pair, False, seed=seed, seeds=ORDERS)
    assert not gpu.findings, f"seed {seed}: {gpu.findings}"
    assert not gpu.launches[-1].differs, f"seed {seed}: {gpu.launches[-1].differences}"


@EVERY
def test_the_fault_is_told(pair: Pair) -> None:
    """From seed 0 on: some faults show in few orders."""
    gpu = emulated(pair, True, seeds=ORDERS)
    assert bool(told(gpu)) is (pair.id not in MISSED), str(gpu.findings)


def test_what_is_missed_is_part_of_the_corpus() -> None:
    assert MISSED.keys() <= {pair.id for pair in pairs()}
    assert len(pairs()) >= 120
    assert not [pair.id for pair in pairs() if not pair.fault.endswith(".")]


def test_a_letter_is_no_error() -> None:
    """`told` counts errors alone."""
    (pair,) = (pair for pair in pairs() if pair.id == "barriers.trip_count")
    gpu = emulated(pair, True)
    assert set(told(gpu)) == {finding.kind for finding in gpu.findings if finding.severity is Severity.ERROR}
