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
from .problem import CacheCase, build, serves, shared_front

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


def test_a_sequence_alone_gives_the_same_bits(seed):
    """batch_invariant, with keys in parts: where parts begin must not follow from what is in the batch."""
    case = CacheCase("invariant", (700, 40, 1100), capacity=1100, page_size=44, heads_q=4, queries=(1, 3, 2))
    built = build(case, seed)
    with emulate("sm_80", seed=seed, schedule="random"):
        out, lse = built.call(backend="sm80", batch_invariant=True)
    built.assert_right((out, lse), f"seed {seed}")
    one = {name: built.arguments[name][:1] for name in ("q", "cache_seqlens", "page_table")}
    one |= dict(cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32), max_seqlen_q=1)
    with emulate("sm_80", seed=seed + 1, sms=3):
        alone = built.call(backend="sm80", batch_invariant=True, **one)
    assert torch.equal(alone[0], out[:1]) and torch.equal(alone[1], lse[:, :1]), f"seed {seed}"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend, name", [(backend, name) for backend in CHIPS for name in CASES])
def test_named_case_under_many_interleavings(backend, name, seed):
    if not serves(backend, CASES[name]):
        pytest.skip("is another backend's")
    judge(backend, name, seed, [(schedule, seed + i) for i in range(4) for schedule in SCHEDULES])
    judge(backend, name, seed, [("random", seed)], num_splits=3)
