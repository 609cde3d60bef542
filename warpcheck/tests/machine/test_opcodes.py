"""Every opcode case on the emulated chip it is for: what the ISA says, to the bit or within the documented error."""

import numpy as np
import pytest
from warpcheck.machine import SCHEDULES
from warpcheck_cases.opcodes import CASES, Case, mismatch
from warpcheck_cases.opcodes.run import expected_of, run_emulated


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, seed: int) -> None:
    inputs = case.inputs(np.random.default_rng(seed))
    schedule = SCHEDULES[seed % len(SCHEDULES)]
    got = run_emulated(case, inputs, chip=case.chips[-1], seed=seed, schedule=schedule)
    assert (wrong := mismatch(case, got, expected_of(case, inputs))) is None, wrong
