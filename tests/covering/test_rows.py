"""Some rows of the arrays, others at each run. All of them: `python -m tests.covering`, which `make soak` runs."""

import random

import pytest
import torch

from tests.covering.__main__ import again
from tests.covering.arrays import ARRAYS, PAIRS
from tests.covering.run import CHIPS, Outcome, Where, in_processes, labels, lost_task, run

_ON_TORCH = 24


def assert_right(outcome: Outcome, chip: str) -> None:
    assert outcome.status == "right", f"{outcome}\n{outcome.text}\nrepeat: {again(chip, outcome)}\n{outcome.row}"


@pytest.mark.parametrize("part", range(4))
def test_rows_on_the_torch_path(part, seed):
    where = Where("torch")
    for label in random.Random(seed).sample(labels(where), _ON_TORCH)[part::4]:
        assert_right(run(label, seed, where), where.chip)


def _labels(where: Where, array: str) -> list[str]:
    """Of an array, and of those that have what it lacks."""
    return [label for label in labels(where) if label.startswith((f"{array}:", f"{array}-"))]


@pytest.mark.rotates(5)
@pytest.mark.parametrize("array", PAIRS)
@pytest.mark.parametrize("chip", CHIPS)
def test_a_row_on_an_emulated_chip(chip, array, seed):
    pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")
    pytest.importorskip("warpcheck.machine._core", reason="the emulator's core is built where there is a compiler")
    label = random.Random(seed).choice(_labels(Where(chip), array))
    assert_right(run(label, seed, Where(chip)), chip)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="runs kernels on a CUDA device")
@pytest.mark.parametrize("array", PAIRS)
def test_rows_on_the_chip_here(array, seed):
    for label in random.Random(seed).sample(_labels(Where("cuda"), array), 5):
        assert_right(run(label, seed, Where("cuda")), "cuda")


def _do(task: tuple[str, int]) -> list[Outcome]:
    if task[0] == "dies":
        raise SystemExit(3)
    if task[0] == "hangs":
        while True:
            pass
    return [Outcome(*task, "right")]


def _lost(task: tuple[str, int], status: str) -> Outcome:
    return Outcome(*task, status)


@pytest.mark.rotates(2)
def test_a_process_that_hangs_or_dies_is_replaced_and_its_task_named():
    tasks = [("a", 1), ("dies", 2), ("b", 3), ("hangs", 4), ("c", 5)]
    outcomes = {outcome.label: outcome.status for outcome in in_processes(_do, _lost, tasks, jobs=2, limit=20.0)}
    assert outcomes == {"a": "right", "b": "right", "c": "right", "dies": "died", "hangs": "hung"}


def test_a_wrong_result_is_found(seed, monkeypatch):
    """The judge of rows can fail, and says how to repeat it."""
    from tests.covering import calls

    right = calls.Call.run
    monkeypatch.setattr(calls.Call, "run", lambda call, backend: {k: x * 1.1 for k, x in right(call, backend).items()})
    full = dict(lengths="tiles", mask_mod="none", seqused="none")  # no result is 0
    number = next(i for i, row in enumerate(ARRAYS["training"].rows()) if full.items() <= row.items())
    outcome = run(f"training:{number}", seed, Where("torch"))
    assert outcome.status == "wrong" and outcome.text
    assert again("torch", outcome) == f"python -m tests.covering --chip torch --row training:{number} --seed {seed}"


def test_a_lost_row_names_its_options():
    assert lost_task(("training:3", 1), "hung").row == ARRAYS["training"].rows()[3]
