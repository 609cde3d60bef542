"""Opcode cases on a chip, beside what the emulator answers: rows of `warpcheck compare`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import click
import numpy as np
from warpcheck.errors import EmulationError
from warpcheck.tools.compare import Row
from warpcheck.tools.libcuda import CudaError, Device
from warpcheck_cases.opcodes import Case, mismatch
from warpcheck_cases.opcodes.case import Inputs, for_chip, is_nan
from warpcheck_cases.opcodes.catalogue import GROUPS
from warpcheck_cases.opcodes.matrix import with_real_operands
from warpcheck_cases.opcodes.run import expected_of, output_for, run_emulated


def rows(device: Device, seeds: int, only: str) -> Iterator[Row]:
    """A row for each group of cases, and one for each matrix instruction on real numbers."""
    for group, cases in GROUPS.items():
        chosen = [case for case in cases if device.chip in case.chips and re.search(only, case.name)]
        if chosen:
            yield _opcode_row(device, group, chosen, seeds)
    for case in GROUPS["matrix"]:
        real = with_real_operands(case)
        if real and device.chip in real.chips and re.search(only, real.name):
            yield _sum_row(device, real, seeds)


def _run_on_device(device: Device, case: Case, inputs: Inputs) -> np.ndarray:
    output = output_for(case, inputs)
    buffers = [output, *(np.ascontiguousarray(array) for array in inputs)]
    addresses = [device.allocate(buffer.tobytes()) for buffer in buffers]
    try:
        device.launch(
            for_chip(case, device.chip), "test", grid=(case.grid, 1, 1), block=(case.block, 1, 1),
            cluster=(case.cluster, 1, 1), smem_bytes=case.smem_bytes,
            params=[np.uint64(address).tobytes() for address in addresses],
        )  # fmt: skip
        return np.frombuffer(device.read(addresses[0], output.nbytes), output.dtype)
    finally:
        for address in addresses:
            device.free(address)


def _differences(case: Case, chip: np.ndarray, emulated: np.ndarray) -> int:
    """Elements whose bits differ; NaNs of any payload are equal, as in the oracle."""
    both_nan = is_nan(chip, case.element) & is_nan(emulated, case.element)
    return int(((chip != emulated) & ~both_nan).sum())


def _opcode_verdict(device: Device, case: Case, seeds: int) -> tuple[str, list[str]]:
    """One of the verdicts of `_opcode_row`, and what to say about it."""
    verdict, notes = "same bits", []
    for seed in range(seeds):
        inputs = case.inputs(np.random.default_rng(seed))
        try:
            emulated = run_emulated(case, inputs, chip=device.chip, seed=seed)
            real = _run_on_device(device, case, inputs)
        except (CudaError, EmulationError) as error:
            return "failed", [f"{case.name}: {error}"]
        wrong = mismatch(case, real, expected_of(case, inputs))
        different = _differences(case, real, emulated)
        if wrong:
            verdict = "chip differs from the ISA's text"
            notes.append(f"chip against the oracle: {wrong}")
        elif different and verdict == "same bits":
            verdict = "both within the documented error" if case.compare != "bits" else "bits differ"
            notes.append(f"{case.name}: {different} of {real.size} elements differ from the emulator's")
    return verdict, notes


def _opcode_row(device: Device, group: str, cases: list[Case], seeds: int) -> Row:
    verdicts: Counter[str] = Counter()
    for case in cases:
        verdict, notes = _opcode_verdict(device, case, seeds)
        verdicts[verdict] += 1
        for note in notes:
            click.echo(note, err=True)
    result = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    agrees = not set(verdicts) - {"same bits", "both within the documented error"}
    return Row(f"opcodes: {group}", f"{len(cases)} cases, {seeds} inputs each", result, agrees)


def _sum_row(device: Device, case: Case, seeds: int) -> Row:
    """Bits of a matrix instruction's sums, in units in the last place of the largest where they differ."""
    different = total = 0
    worst = 0.0
    dtype = np.float16 if ".f16.f16.f16" in case.name else np.float32
    for seed in range(seeds):
        inputs = case.inputs(np.random.default_rng(seed))
        try:
            emulated = run_emulated(case, inputs, chip=device.chip, seed=seed).view(dtype)
            real = _run_on_device(device, case, inputs).view(dtype)
        except (CudaError, EmulationError) as error:
            return Row(case.name, f"seed {seed}", f"failed: {error}", False)
        different += int((real != emulated).sum())
        total += real.size
        difference = np.abs(real.astype(np.float64) - emulated.astype(np.float64)).max()
        worst = max(worst, float(difference / np.spacing(np.abs(real).max())))
    result = "same bits" if not different else f"{different} differ, by at most {worst:.2g} ulp of the largest"
    return Row(case.name, f"{total:,} sums", result, not different)
