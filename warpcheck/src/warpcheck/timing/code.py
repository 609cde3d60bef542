"""Issue model of a recorded launch: from its machine code if ptxas and nvdisasm are installed, else an estimate."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from warpcheck.machine.record import Record
from warpcheck.timing.issue import Issue, from_machine_code, from_ptx
from warpcheck.toolkit import program

_issues: dict[tuple[str, str, bool], Issue] = {}


@functools.cache
def assembler() -> str | None:
    """Return the path of ptxas from PyPI's nvidia-cuda-nvcc or the search path; None if it is not installed."""
    return program("ptxas") or shutil.which("ptxas")


@functools.lru_cache(maxsize=32)
def cubin(ptx: str, chip: str) -> bytes:
    """Return the cubin of a PTX text, with the line information that `sass.issue_model` needs.

    Raises:
        FileNotFoundError: ptxas is not installed.
        RuntimeError: ptxas refuses the text.
    """
    ptxas = assembler()
    if ptxas is None:
        raise FileNotFoundError("ptxas is missing: pip install nvidia-cuda-nvcc")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        command = [ptxas, "-arch", chip, "-lineinfo", "-O3", "-o", str(target), str(source)]
        source.write_text(ptx)
        done = subprocess.run(command, capture_output=True, text=True)
        if newest := re.search(r"Unsupported \.version [\d.]+; current version is '([\d.]+)'", done.stderr):
            # ptxas is older than the text. It accepts its own version number if it knows all instructions.
            source.write_text(re.sub(r"^(\s*\.version\s+)[\d.]+", rf"\g<1>{newest[1]}", ptx, count=1, flags=re.M))
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas refuses the kernel for {chip}: {done.stderr.strip()[:400]}")
        return target.read_bytes()


def issue_of(record: Record, *, guess: bool = False) -> Issue:
    """Return the issue model of a recorded launch. guess: estimate it from PTX, even if machine code is available."""
    launch = record.launch
    key = (launch.ptx, launch.entry, guess)
    if key not in _issues:
        _issues[key] = from_ptx(record.kernel) if guess else _best(record)
    return _issues[key]


def _best(record: Record) -> Issue:
    try:
        return issue_with(record, binary_of(record))
    except (ImportError, FileNotFoundError):
        return from_ptx(record.kernel)


def issue_with(record: Record, binary: bytes) -> Issue:
    """Return the issue model of a recorded launch from its machine code."""
    from warpcheck.timing.sass import issue_model
    from warpcheck.timing.sass.code import registers

    launch = record.launch
    issue = from_machine_code(record.kernel, issue_model(launch.ptx, binary, launch.entry))
    return dataclasses.replace(issue, registers=registers(binary, launch.entry))


def binary_of(record: Record) -> bytes:
    """Return the cubin of a recorded launch: that of CuTe DSL if available, else that of `cubin`.

    Raises:
        FileNotFoundError, RuntimeError: as `cubin`.
    """
    return _compiled(record.launch.ptx) or cubin(record.launch.ptx, record.launch.chip)


def _compiled(ptx: str) -> bytes | None:
    """Return the cubin of CuTe DSL's own ptxas, which differs from the installed version.

    None if the emulator did not see it, or if it has no line information.
    """
    from warpcheck.host.modules import machine_code
    from warpcheck.timing.sass.code import cubin_in, embedded_ptx

    binary = machine_code(ptx)
    try:
        found = None if binary is None else cubin_in(binary)
        return found if found is not None and embedded_ptx(found) else None
    except ValueError:  # compressed
        return None
