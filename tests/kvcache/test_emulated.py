"""Caches in the portable kernels on the emulated chip: right, and free of races and stray reads, whatever is in pages
that no sequence has."""

import random

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("fa4.emulator.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from fa4.emulator import emulate
from fa4.emulator.machine import SCHEDULES

from .named import CASES
from .problem import build, shared_front


def judge(name: str, seed: int, interleavings, **changes) -> None:
    """Right, and with equal bits under all interleavings."""
    built, first = build(CASES[name], seed), None
    if built.case.shared:
        shared_front(built)
    for schedule, emulator_seed in interleavings:
        with emulate("sm_80", seed=emulator_seed, schedule=schedule):
            result = built.call(backend="sm80", **changes)
        where = f"seed {seed}, {schedule}"
        if first is None:
            first = result
            built.assert_right(result, where)
        assert all(torch.equal(a, b) for a, b in zip(result, first)), f"{name} differs, {where}"


# Compiling takes most of a case's time; these show each part of the kernel once.
USUAL = (
    "pages_of_1",
    "pages_of_64",
    "pages_of_128",
    "batch_idx",
    "leftpad_in_pages",
    "packed_append",
    "append_and_rotate_in_pages",
    "softcap_and_sink_in_pages",
)


@pytest.mark.parametrize("name", USUAL)
def test_named_case(name, seed):
    judge(name, seed, [(schedule, seed) for schedule in random.Random(seed).sample(SCHEDULES, 2)])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.fp8])
def test_named_case_under_many_interleavings(name, seed):
    judge(name, seed, [(schedule, seed + i) for i in range(4) for schedule in SCHEDULES])
    judge(name, seed, [("random", seed)], num_splits=3)
