"""Caches in the portable kernels and in Hopper's on the emulated chips: right, and free of races and stray reads,
whatever is in pages that no sequence has."""

import random

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
pytest.importorskip("fa4.emulator.machine._core", reason="the emulator's core is built where there is a C++ compiler")

from fa4.emulator import emulate
from fa4.emulator.machine import SCHEDULES

from .named import CASES
from .problem import build, serves, shared_front

CHIPS = {"sm80": "sm_80", "sm90": "sm_90a"}


def judge(backend: str, name: str, seed: int, interleavings, **changes) -> None:
    """Right, and with equal bits under all interleavings."""
    built, first = build(CASES[name], seed), None
    if built.case.shared:
        shared_front(built)
    for schedule, emulator_seed in interleavings:
        with emulate(CHIPS[backend], seed=emulator_seed, schedule=schedule):
            result = built.call(backend=backend, **changes)
        where = f"seed {seed}, {schedule}"
        if first is None:
            first = result
            built.assert_right(result, where)
        assert all(torch.equal(a, b) for a, b in zip(result, first)), f"{name} differs, {where}"


# Compiling takes most of a case's time; these show each part of the kernel once.
SM80 = (
    "pages_of_1",
    "pages_of_64",
    "pages_of_128",
    "batch_idx",
    "leftpad_in_pages",
    "packed_append",
    "append_and_rotate_in_pages",
    "fp8_heads_in_pages",
    "fp8_float16",
    "softcap_and_sink_in_pages",
)


# Pages that hold whole blocks of keys.
SM90 = ("pages_of_128", "chunk_in_large_pages", "leftpad_and_batch_idx", "packed_queries_dense_cache")


@pytest.mark.parametrize("backend, name", [*(("sm80", name) for name in SM80), *(("sm90", name) for name in SM90)])
def test_named_case(backend, name, seed):
    judge(backend, name, seed, [(schedule, seed) for schedule in random.Random(seed).sample(SCHEDULES, 2)])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend, name", [(backend, name) for backend in CHIPS for name in CASES])
def test_named_case_under_many_interleavings(backend, name, seed):
    if not serves(backend, CASES[name]):
        pytest.skip("is another backend's")
    judge(backend, name, seed, [(schedule, seed + i) for i in range(4) for schedule in SCHEDULES])
    judge(backend, name, seed, [("random", seed)], num_splits=3)
