"""Run an opcode case on an emulated chip."""

from __future__ import annotations

import numpy as np
from warpcheck.machine import Allocation, EmulationOptions, Machine
from warpcheck_cases.opcodes.case import Case, Inputs, for_chip

_OUTPUT_BITS = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f64": np.uint64}


def expected_of(case: Case, inputs: Inputs) -> np.ndarray:
    """The oracle's answer; the inputs are copied, so that a kernel may write to its own."""
    with np.errstate(all="ignore"):
        return np.ascontiguousarray(case.expected(*(array.copy() for array in inputs)))


def output_for(case: Case, inputs: Inputs) -> np.ndarray:
    """A zeroed output array of bit patterns, as large as the oracle's answer."""
    expected = expected_of(case, inputs)
    if case.compare == "bits":
        return np.zeros(expected.size, f"u{expected.dtype.itemsize}")
    return np.zeros(expected.size, _OUTPUT_BITS[case.element])


def run_emulated(case: Case, inputs: Inputs, *, chip: str, seed: int = 0, schedule: str = "round_robin") -> np.ndarray:
    """What the entry leaves in its output on the emulated chip. Raises EmulationError for whatever it does wrong."""
    buffers = [output_for(case, inputs), *(np.ascontiguousarray(array).copy() for array in inputs)]
    names = ["out", *(f"in{i}" for i in range(len(inputs)))]
    Machine(chip, EmulationOptions(seed=seed, schedule=schedule)).launch(
        for_chip(case, chip),
        "test",
        grid=(case.grid, 1, 1),
        block=(case.block, 1, 1),
        cluster=(case.cluster, 1, 1),
        smem_bytes=case.smem_bytes,
        params=[np.uint64(buffer.ctypes.data).tobytes() for buffer in buffers],
        allocations=[
            Allocation(buffer.ctypes.data, buffer.nbytes, name) for buffer, name in zip(buffers, names) if buffer.nbytes
        ],
    )
    return buffers[0]
