"""Does a real chip agree with the emulator?

    python -m fa4.emulator.hardware opcodes [--seeds 3] [--only REGEX]   every opcode case, on the GPU and emulated
    python -m fa4.emulator.hardware record DIR --cutlass PATH [--only REGEX]   foreign kernels, emulated, to files
    python -m fa4.emulator.hardware replay DIR                           those files, on the GPU

`opcodes` and `replay` need a CUDA device and its driver, nothing else; `record` needs CuTe DSL and no device.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import click
import numpy as np

from fa4.emulator.errors import EmulationError
from fa4.emulator.examples import EXAMPLES
from fa4.emulator.libcuda import CudaError, Device
from fa4.emulator.opcodes import CASES, Case, mismatch
from fa4.emulator.opcodes.case import Inputs, for_chip
from fa4.emulator.opcodes.run import expected_of, output_for, run_emulated
from fa4.emulator.recording import Recorder, Recording


@click.group(help=__doc__)
def main() -> None: ...


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
    if case.element in ("f32", "f16"):
        kind = np.float32 if case.element == "f32" else np.float16
        with np.errstate(invalid="ignore"):
            both_nan = np.isnan(chip.view(kind)) & np.isnan(emulated.view(kind))
        width = f"u{np.dtype(kind).itemsize}"
        return int(((chip.view(width) != emulated.view(width)) & ~both_nan).sum())
    return int((chip != emulated).sum())


@main.command()
@click.option("--seeds", default=3, show_default=True)
@click.option("--only", default="", help="Regular expression on the names of cases.")
def opcodes(seeds: int, only: str) -> None:
    """Run every opcode case on the GPU and emulated, and compare the bits."""
    device = Device()
    click.echo(f"{device.name} ({device.chip})")
    result: Counter[str] = Counter()
    for case in CASES:
        if device.chip not in case.chips or not re.search(only, case.name):
            continue
        verdict = "same bits"
        for seed in range(seeds):
            inputs = case.inputs(np.random.default_rng(seed))
            try:
                emulated = run_emulated(case, inputs, chip=device.chip, seed=seed)
                real = _run_on_device(device, case, inputs)
            except (CudaError, EmulationError) as error:
                verdict = "failed"
                click.echo(f"  {case.name}: {error}")
                break
            wrong = mismatch(case, real, expected_of(case, inputs))
            different = _differences(case, real, emulated)
            if wrong:
                verdict = "chip differs from the oracle"
                click.echo(f"  chip against oracle: {wrong}")
            elif different and verdict == "same bits":
                verdict = "both right, bits differ" if case.compare != "bits" else "bits differ"
                click.echo(f"  {case.name}: {different} of {real.size} elements differ from the emulator's")
        result[verdict] += 1
    click.echo("; ".join(f"{count} cases: {verdict}" for verdict, count in result.most_common()))
    if set(result) - {"same bits", "both right, bits differ"}:
        raise SystemExit(1)


@main.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--cutlass", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--only", default="hopper|ampere", show_default=True, help="Regular expression on the names of examples.")
@click.option("--chip", default="sm_90a", show_default=True, help="Chip to record for.")
def record(folder: Path, cutlass: Path, only: str, chip: str) -> None:
    """Run foreign examples emulated and write their launches, to be replayed on a GPU."""
    from fa4.emulator import emulate

    folder.mkdir(parents=True, exist_ok=True)
    for example in EXAMPLES:
        if not re.search(only, example.name):
            continue
        with emulate(chip if example.chip == "sm_80" else example.chip) as gpu:
            recorder = Recorder(gpu, folder, example.name)
            example.run(cutlass)
        click.echo(f"{example.name}: {recorder.count} launches")


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def replay(folder: Path) -> None:
    """Run recorded launches on the GPU and compare the memory they leave with the emulator's."""
    device = Device()
    click.echo(f"{device.name} ({device.chip})")
    for path in sorted(folder.glob("*.npz")):
        recording = Recording.load(path)
        if recording.chip != device.chip:
            click.echo(f"{path.stem}: recorded for {recording.chip}, skipped")
            continue
        addresses = [device.allocate(content) for content in recording.before]
        device.launch(
            recording.ptx, recording.entry, grid=recording.grid, block=recording.block, cluster=recording.cluster,
            smem_bytes=recording.smem_bytes, params=recording.moved_params(addresses),
        )  # fmt: skip
        click.echo(f"{path.stem}: {_compared(device, recording, addresses)}")
        for address in addresses:
            device.free(address)


def _compared(device: Device, recording: Recording, addresses: list[int]) -> str:
    """How the bytes that the kernel changed compare."""
    changed = different = 0
    examples = []
    for address, before, after in zip(addresses, recording.before, recording.after):
        real = np.frombuffer(device.read(address, len(after)), np.uint8)
        emulated, start = np.frombuffer(after, np.uint8), np.frombuffer(before, np.uint8)
        touched = (emulated != start) | (real != start)
        changed += int(touched.sum())
        wrong = np.flatnonzero(real != emulated)
        different += wrong.size
        if wrong.size and len(after) % 2 == 0:
            first = int(wrong[0]) & ~3
            examples.append(f"chip {real[first : first + 4].tobytes().hex()} emulated {after[first : first + 4].hex()}")
    if not different:
        return f"{changed:,} changed bytes, all the same"
    return f"{different:,} of {changed:,} changed bytes differ: {'; '.join(examples[:3])}"


if __name__ == "__main__":
    main()
