"""Run an unmodified Python script on an emulated chip and return the findings of its kernels."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpcheck.findings import Findings
from warpcheck.machine import LaunchReport, Order


@dataclass(frozen=True)
class Outcome:
    """exit_code: of the script; 1 after an exception, which is printed. launches: of the first order, with the orders
    that left other bytes."""

    exit_code: int
    findings: Findings
    launches: tuple[LaunchReport, ...]


@contextlib.contextmanager
def _as_from_the_shell(arguments: Sequence[str]) -> Iterator[None]:
    """`sys.argv` and `sys.path` as the interpreter sets them for `python ARGUMENTS`."""
    argv, path = sys.argv, list(sys.path)
    module = arguments[0] == "-m"
    sys.argv = list(arguments[1:] if module else arguments)
    sys.path.insert(0, "" if module else str(Path(arguments[0]).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def run_script(arguments: Sequence[str], chip: str, orders: Sequence[Order], **options: Any) -> Outcome:
    """Run `python ARGUMENTS` (a script or `-m MODULE`, and what follows) in this process on an emulated chip.

    Every launch runs in all of `orders`, from the same memory; the script sees the results of the first. options:
    further fields of `warpcheck.EmulationOptions`.
    """
    from warpcheck.context import emulate

    (seed, schedule), *others = orders
    given = {**options, "seed": seed, "schedule": schedule, "on_finding": "collect"}
    with emulate(chip, tells_devices_apart=True, **given) as gpu:
        gpu.repeat(others)
        exit_code = run_as_from_the_shell(arguments)
        return Outcome(exit_code, gpu.findings, tuple(gpu.launches))


def run_as_from_the_shell(arguments: Sequence[str]) -> int:
    """Run `python ARGUMENTS` in this process and return its exit code; 1 after an exception, which is printed."""
    try:
        with _as_from_the_shell(arguments):
            if arguments[0] == "-m":
                runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as exit_:
        if isinstance(exit_.code, str):
            print(exit_.code, file=sys.stderr)
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0
