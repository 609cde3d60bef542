"""python -m tests.gpu.first_day: everything to look at on a chip that no kernel has run on yet, in order.

What is cheap and tells most comes first; each step runs in a process of its own, so that one that kills the CUDA
context does not end the day. Ends with a table, and with status 1 if a step failed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

import click
import torch
from rich.console import Console
from rich.table import Table

from fa4.runtime.device import chip_of
from tests.gpu.offered import offered

_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m")


@dataclass(frozen=True)
class Step:
    """One check. `command` is arguments of this Python; `under` is a tool that runs it."""

    name: str
    why: str
    command: tuple[str, ...]
    under: tuple[str, ...] = ()
    backend: str = ""  # of the chip, "" for any


_TUNE = ("-m", "bench.tune", "--chip", "100", "--suite", "sm100", "--filter")

STEPS = (
    Step("environment", "what is installed, which backends run", ("-m", "fa4", "env")),
    Step("opcodes", "instructions do what the emulator says they do", ("-m", "warpcheck", "compare")),
    Step("forward", "every named case against the oracle", (*_PYTEST, "gpu", "tests/gpu/test_cases.py::test_forward")),
    Step(
        "memcheck", "no access out of bounds, on one case per kind of kernel",
        (*_PYTEST, "gpu", "tests/gpu/test_cases.py::test_gradients", "-k", "unordered and (causal_d128 or varlen)"),
        under=("compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "1"),
    ),
    Step("tiles", "every row, repeated bit for bit", (*_PYTEST, "gpu and not soak", "tests/gpu/test_sm100_tiles.py"),
         backend="sm100"),
    Step("gradients", "every named case", (*_PYTEST, "gpu", "tests/gpu/test_cases.py::test_gradients")),
    Step("order of products", "a thousand repetitions of what the ISA does not promise",
         (*_PYTEST, "gpu and soak", "tests/gpu/test_sm100_tiles.py"), backend="sm100"),
    Step("determinism", "fifty repetitions of each deterministic kernel",
         (*_PYTEST, "gpu", "tests/gpu/test_cases.py::test_deterministic_gradients_repeat_bit_for_bit")),
    Step("launches", "streams, graphs, chains of launches, threads, a second device, large grids and offsets",
         (*_PYTEST, "gpu", "tests/gpu/test_launch.py")),
    Step("rows, causal", "schedules against each other", (*_TUNE, "d128 causal b4 "), backend="sm100"),
    Step("rows, full", "single CTAs against pairs", (*_TUNE, "d128 full b4 "), backend="sm100"),
    Step("overhead", "host time of a call", ("-m", "bench.overhead")),
    Step("times", "against every other provider, checked before timed", ("-m", "bench.run", "--suite", "sm100")),
)  # fmt: skip


def steps_for(backends: tuple[str, ...]) -> list[Step]:
    """The steps for a chip that offers `backends`."""
    return [step for step in STEPS if not step.backend or step.backend in backends]


@click.command(help=__doc__)
@click.option("--only", default="", help="Steps whose name contains this.")
@click.option("--list", "list_only", is_flag=True, help="Print the steps and their commands, run nothing.")
def main(only: str, list_only: bool) -> None:
    console = Console(soft_wrap=True)
    chosen = [step for step in steps_for(offered()) if only in step.name]
    if list_only:
        for step in chosen:
            console.print(f"{step.name}: {step.why}\n    {' '.join((*step.under, 'python', *step.command))}")
        return
    if not torch.cuda.is_available():
        raise click.ClickException("needs a CUDA device; --list shows the steps")
    table = Table("step", "result", "seconds", title=f"first day on {chip_of(torch.device('cuda'))}")
    failed = False
    for step in chosen:
        console.rule(f"{step.name}: {step.why}")
        if step.under and shutil.which(step.under[0]) is None:
            table.add_row(step.name, f"left out: no {step.under[0]} here", "")
            continue
        start = time.perf_counter()
        code = subprocess.run([*step.under, sys.executable, *step.command]).returncode
        failed |= code != 0
        table.add_row(step.name, "ok" if code == 0 else f"FAILED ({code})", f"{time.perf_counter() - start:.0f}")
    console.print(table)
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
