"""Planted mistakes are found, by name and place; the same kernels without them are clean."""


import pytest
import torch

pytest.importorskip("cutlass", reason="CuTe DSL is installed on Linux only")

from cutlass.cute.runtime import from_dlpack

from fa4.emulator import emulate
from fa4.emulator.errors import DataRace, Deadlock, EmulationError, OutOfBounds, UninitializedRead
from fa4.emulator.machine import SCHEDULES
from tests.emulator.planted import COLUMNS, ROWS, run_pipeline, run_unwaited_copy


def pipeline_error(mistake: str, chip: str, seed: int, schedule: str) -> EmulationError | None:
    source = torch.randn(ROWS, COLUMNS)
    result = torch.zeros(ROWS, COLUMNS)
    with emulate(chip, seed=seed, schedule=schedule):
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
    assert "mbarrier" in text and "planted.py" in text and "warp 0" in text and "warp 1" in text


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_missing_wait_is_a_race(schedule: str, seed: int) -> None:
    """The producer overwrites a row that the consumers may still read; no schedule need make it bite."""
    error = pipeline_error("missing wait", "sm_100a", seed, schedule)
    assert isinstance(error, (DataRace, Deadlock)), error
    assert "planted.py" in str(error)


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
