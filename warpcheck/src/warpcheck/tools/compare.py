"""Does a real chip agree with the emulator?

    warpcheck compare [DIR] [--seeds 3] [--only REGEX]
    python -m fa4.emulator.record DIR --cutlass PATH [--only REGEX]

`compare` needs a CUDA device and its driver, nothing else. It runs every opcode case on the device and emulated, from
the same PTX; then matrix instructions on normally distributed operands, whose sums tell their order and precision; then
the launches that `record`, which needs CuTe DSL and no device, wrote to DIR. It prints a Markdown table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from warpcheck_cases.opcodes import Case, mismatch
from warpcheck_cases.opcodes.case import Inputs, for_chip, is_nan
from warpcheck_cases.opcodes.catalogue import GROUPS
from warpcheck_cases.opcodes.matrix import with_real_operands
from warpcheck_cases.opcodes.run import expected_of, output_for, run_emulated

from fa4 import cases as problems
from warpcheck.errors import EmulationError
from warpcheck.options import CHIP, COUNT, PATTERN
from warpcheck.tools.examples import EXAMPLES
from warpcheck.tools.libcuda import CudaError, Device
from warpcheck.tools.recording import Recorder, Recording

_NAMES = "^(hopper|ampere|fwd|bwd)"  # of what is recorded; fa4's own calls begin with their direction
OWN = (  # none with packed sequences: their tensor maps begin where no recorded memory lies
    problems.Case("fwd", seqlen_q=200, seqlen_k=200, causal=True),
    problems.Case("fwd_d128_gqa", seqlen_q=130, seqlen_k=260, head_dim=128, causal=True, heads_kv=1),
    problems.Case("fwd_d256", seqlen_q=130, seqlen_k=150, head_dim=256),
    problems.Case("fwd_decode", seqlen_q=1, seqlen_k=1300, heads_q=8, heads_kv=2, head_dim=128, causal=True),
    problems.Case("bwd_d64", seqlen_q=150, seqlen_k=200),
    problems.Case("bwd_d128_causal", seqlen_q=200, seqlen_k=300, head_dim=128, causal=True),
    problems.Case(
        "bwd_d128_ordered", seqlen_q=200, seqlen_k=300, head_dim=128, causal=True, deterministic=True, heads_kv=1
    ),
    problems.Case("bwd_d128_ordered_full", seqlen_q=250, seqlen_k=300, head_dim=128, deterministic=True),
    problems.Case("bwd_d192_128", seqlen_q=150, seqlen_k=200, head_dim=192, head_dim_v=128, causal=True),
    problems.Case("bwd_d256", seqlen_q=150, seqlen_k=200, head_dim=256, causal=True, heads_kv=1),
)


@click.group(help=__doc__)
def main() -> None: ...


@dataclass(frozen=True)
class Row:
    """One line of the table. `agrees` is False for what neither rounding nor a documented error explains."""

    what: str
    compared: str
    result: str
    agrees: bool = True

    def __str__(self) -> str:
        return f"| {self.what} | {self.compared} | {self.result} |"


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


def _recorded_row(device: Device, recording: Recording, name: str) -> Row:
    addresses = [device.allocate(content) for content in recording.before]
    try:
        device.launch(
            recording.ptx, recording.entry, grid=recording.grid, block=recording.block, cluster=recording.cluster,
            smem_bytes=recording.smem_bytes, params=recording.moved_params(addresses),
        )  # fmt: skip
        left = [device.read(address, len(after)) for address, after in zip(addresses, recording.after)]
    except CudaError as error:
        return Row(name, recording.entry[:40], f"failed: {error}", False)
    finally:
        for address in addresses:
            device.free(address)
    changed = sum(
        int((np.frombuffer(after, np.uint8) != np.frombuffer(before, np.uint8)).sum())
        for before, after in zip(recording.before, recording.after)
    )
    notes = [
        note
        for memory, real, after in zip(recording.names, left, recording.after)
        if (note := _memory_difference(memory, real, after))
    ]
    return Row(name, f"{changed:,} bytes written", "; ".join(notes) or "same bits", not notes)


def _memory_difference(name: str, real: bytes, emulated: bytes) -> str:
    """How two contents of a range differ, "" if they do not; `name` ends in the dtype of a tensor."""
    if real == emulated:
        return ""
    dtype = getattr(torch, name.rpartition("torch.")[2], torch.uint8)
    a, b = (torch.frombuffer(bytearray(raw), dtype=dtype) for raw in (real, emulated))
    different = int((a.view(torch.uint8).view(-1, a.element_size()) != b.view(torch.uint8).view(-1, b.element_size()))
                    .any(1).sum())  # fmt: skip
    error, largest = (a.double() - b.double()).abs().max().item(), b.double().abs().max().item()
    return f"{name}: {different:,} of {a.numel():,} elements differ, by at most {error:.2g} (largest {largest:.2g})"


@main.command()
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--seeds", type=COUNT, default=3, show_default=True)
@click.option("--only", type=PATTERN, default="", help="Regular expression on the names of cases and of recordings.")
def compare(folder: Path | None, seeds: int, only: str) -> None:
    """Run opcode cases, matrix sums and recorded launches on the GPU, and compare with the emulator."""
    try:
        device = Device()
    except (OSError, CudaError) as error:
        raise click.UsageError(f"no GPU to compare with: {error}") from None
    rows = list(_rows(device, folder, seeds, only))
    click.echo(f"| on one {device.name} ({device.chip}) | compared | result |\n|---|---|---|")
    click.echo("\n".join(map(str, rows)))
    if not all(row.agrees for row in rows):
        raise SystemExit(1)


def _rows(device: Device, folder: Path | None, seeds: int, only: str) -> Iterator[Row]:
    for group, cases in GROUPS.items():
        chosen = [case for case in cases if device.chip in case.chips and re.search(only, case.name)]
        if chosen:
            yield _opcode_row(device, group, chosen, seeds)
    for case in GROUPS["matrix"]:
        real = with_real_operands(case)
        if real and device.chip in real.chips and re.search(only, real.name):
            yield _sum_row(device, real, seeds)
    for path in sorted(folder.glob("*.npz")) if folder else ():
        recording = Recording.load(path)
        if recording.chip == device.chip and re.search(only, path.stem):
            yield _recorded_row(device, recording, path.stem.replace("_", " "))


@main.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--cutlass", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", type=PATTERN, default=_NAMES, show_default=True,
              help="Regular expression on the names of examples.")  # fmt: skip
@click.option("--chip", type=CHIP, default="sm_90a", show_default=True, help="Chip to record for.")
def record(folder: Path, cutlass: Path, only: str, chip: str) -> None:
    """Run foreign examples, and fa4's own forwards and backwards, emulated, and write their launches."""
    from warpcheck import emulate

    folder.mkdir(parents=True, exist_ok=True)
    for example in EXAMPLES:
        if re.search(only, example.name):
            with emulate(chip) as gpu:
                recorder = Recorder(gpu, folder, example.name)
                example.run(cutlass)
            click.echo(f"{example.name}: {recorder.count} launches")
    for case in OWN:
        if re.search(only, case.name):
            with emulate(chip) as gpu:
                recorder = Recorder(gpu, folder, case.name)
                problem = problems.make(case, seed=0)
                problem.call_with_gradients() if case.name.startswith("bwd") else problem.call()
            click.echo(f"{case.name}: {recorder.count} launches")


if __name__ == "__main__":
    main()
