"""Comparison of a real chip with the emulator.

    warpcheck compare [DIR] [--seeds 3] [--only REGEX]

Needs a CUDA device and its driver only. Runs the recorded launches in DIR on the device, and compares the final
contents of memory with those of the emulator. In a checkout it first runs every opcode case on both, from the same PTX,
then matrix instructions on normally distributed operands, whose sums show their order and precision. Prints a Markdown
table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np

from warpcheck import repository
from warpcheck.options import COUNT, PATTERN
from warpcheck.tools.libcuda import CudaError, Device
from warpcheck.tools.recording import Recording


@dataclass(frozen=True)
class Row:
    """One line of the table. `agrees` is False if neither rounding nor a documented error explains the difference."""

    what: str
    compared: str
    result: str
    agrees: bool = True

    def __str__(self) -> str:
        return f"| {self.what} | {self.compared} | {self.result} |"


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
    import torch

    dtype = getattr(torch, name.rpartition("torch.")[2], torch.uint8)
    a, b = (torch.frombuffer(bytearray(raw), dtype=dtype) for raw in (real, emulated))
    different = int((a.view(torch.uint8).view(-1, a.element_size()) != b.view(torch.uint8).view(-1, b.element_size()))
                    .any(1).sum())  # fmt: skip
    error, largest = (a.double() - b.double()).abs().max().item(), b.double().abs().max().item()
    return f"{name}: {different:,} of {a.numel():,} elements differ, by at most {error:.2g} (largest {largest:.2g})"


@click.command("compare", help=__doc__, short_help="Compare a real chip with the emulator.")
@click.argument("folder", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--seeds", type=COUNT, default=3, show_default=True, help="Inputs of each opcode case.")
@click.option("--only", type=PATTERN, default="", help="Regular expression on the names of cases and of recordings.")
def main(folder: Path | None, seeds: int, only: str) -> None:
    if folder is None and not repository.is_here():
        raise click.UsageError("DIR is missing: the opcode cases are in the repository, in no wheel")
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
    if repository.is_here():
        yield from repository.module("warpcheck_cases.on_device").rows(device, seeds, only)
    for path in sorted(folder.glob("*.npz")) if folder else ():
        recording = Recording.load(path)
        if recording.chip == device.chip and re.search(only, path.stem):
            yield _recorded_row(device, recording, path.stem.replace("_", " "))
