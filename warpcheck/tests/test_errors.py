"""Planted errors are found by name and location, and the docs show the texts; correct kernels are clean."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from cutlass.cute.runtime import from_dlpack
from warpcheck.errors import DataRace, Deadlock, EmulationError, OutOfBounds, UninitializedRead
from warpcheck.machine import SCHEDULES
from warpcheck_cases.planted import COLUMNS, ROWS, run_pipeline, run_unwaited_copy

from warpcheck import emulate

ROOT = Path(__file__).parents[2]


def pipeline_error(mistake: str, chip: str, seed: int, schedule: str) -> EmulationError | None:
    source = torch.randn(ROWS, COLUMNS)
    result = torch.zeros(ROWS, COLUMNS)
    with emulate(chip, seed=seed, schedule=schedule) as gpu:
        gpu.roles = {0: "producer", 1: "consumer"}
        try:
            run_pipeline(from_dlpack(source), from_dlpack(result), mistake)
        except EmulationError as error:
            return error
    assert torch.equal(result, 2 * source)
    return None


@pytest.mark.parametrize("chip", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_correct_pipeline_is_clean(chip: str, schedule: str, seed: int) -> None:
    assert pipeline_error("none", chip, seed, schedule) is None


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_deadlock_names_the_waiters(schedule: str, seed: int) -> None:
    error = pipeline_error("deadlock", "sm_100a", seed, schedule)
    assert isinstance(error, Deadlock)
    text = str(error)
    assert "mbarrier" in text and "planted.py" in text and "warp 0 (producer)" in text and "warp 1 (consumer)" in text


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_missing_wait_is_found(schedule: str, seed: int) -> None:
    """The consumers read a row that the producer may not have written, or is writing."""
    error = pipeline_error("missing wait", "sm_100a", seed, schedule)
    assert isinstance(error, (DataRace, UninitializedRead)), error
    assert "planted.py" in str(error)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_early_release_is_a_race(schedule: str, seed: int) -> None:
    """The producer may overwrite a row before the consumers have read it; no schedule need make it bite."""
    error = pipeline_error("early release", "sm_100a", seed, schedule)
    assert isinstance(error, DataRace), error
    assert len(error.others) == 1 and str(error).count("planted.py") == 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_out_of_bounds_names_the_tensor(schedule: str, seed: int) -> None:
    error = pipeline_error("out of bounds", "sm_100a", seed, schedule)
    assert isinstance(error, OutOfBounds)
    assert f"{ROWS}x{COLUMNS}" in str(error) and "planted.py" in str(error)


def test_unwaited_copy_is_found(seed: int) -> None:
    source, result = torch.randn(COLUMNS), torch.zeros(COLUMNS)
    with emulate("sm_80", seed=seed):
        run_unwaited_copy(from_dlpack(source), from_dlpack(result), True)
        assert torch.equal(source, result)
        with pytest.raises((UninitializedRead, DataRace), match=r"planted\.py"):
            run_unwaited_copy(from_dlpack(source), from_dlpack(result), False)


def comparable(text: str) -> str:
    """Without what depends on the machine or on the version of the compiler."""
    text = text.replace(f"{ROOT}/", "")
    text = re.sub(r"ptx line \d+: .*?, (?=\S+\.py:)", "", text)
    return re.sub(r"0x[0-9a-f]{6,}", "ADDRESS", text).strip()


@pytest.mark.parametrize("mistake", ["deadlock", "missing wait", "out of bounds"])
def test_the_docs_show_the_text_of(mistake: str) -> None:
    documentation = (ROOT / "docs" / "results" / "emulator-findings.md").read_text()
    shown = re.search(rf"<!-- planted: {mistake} -->\s*```text\n(.*?)```", documentation, re.S)
    assert shown is not None
    error = pipeline_error(mistake, "sm_100a", seed=0, schedule="round_robin")
    assert comparable(shown[1]) == comparable(f"{type(error).__name__}: {error}")
