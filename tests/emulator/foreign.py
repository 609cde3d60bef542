"""Known-good kernels that were not written here, unmodified, on the emulator:

    warpcheck catalogue --cutlass PATH [--only REGEX] [--seeds 5]
    warpcheck catalogue --packages [--only REGEX] [--write docs/results]

The second runs public packages that are installed (tests/emulator/public). In the first, PATH is a checkout of
NVIDIA/cutlass.
Every example runs as its own script, with fresh random inputs, and checks its own results against torch; one that
compares nothing fails. Each of its kernel launches is repeated from the same memory under every other seed and
schedule, and must leave the same bits. Where it may not (sums by atomics), the whole script runs, and checks, again.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from warpcheck.findings import Severity
from warpcheck.machine import SCHEDULES, Order
from warpcheck.options import COUNT, PATTERN
from warpcheck.tools.examples import EXAMPLES, Example

_SMS = 4


@dataclass
class Outcome:
    """What the runs of one example showed.

    comparisons: how often the example held a result against a reference.
    error: largest |actual - expected| that these comparisons saw, relative to the largest |expected|; absolute where
    the example only prints it (`absolute`).
    instructions: warp-instructions of one run's launches; seconds: what they took with all checks on.
    """

    name: str
    runs: int = 0
    launches: int = 0
    comparisons: int = 0
    error: float = 0.0
    absolute: bool = False
    instructions: int = 0
    seconds: float = 0.0
    failure: str = ""
    repeated: bool = field(default=False)


@contextlib.contextmanager
def _observed_comparisons(outcome: Outcome) -> Iterator[None]:
    """Note the error of every comparison that an example makes through torch."""
    import torch
    from warpcheck.host.replaced import replaced

    def note(actual: Any, expected: Any) -> None:
        if not (isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)) or not actual.numel():
            return
        outcome.comparisons += 1
        a, e = actual.detach().double(), expected.detach().double()
        if a.shape == e.shape:
            finite = torch.isfinite(e)
            difference = (a - e)[finite].abs().max().item() if finite.any() else 0.0
            scale = e[finite].abs().max().item() if finite.any() else 1.0
            outcome.error = max(outcome.error, difference / (scale or 1.0))

    def observing(function: Any) -> Any:
        def call(actual: Any, expected: Any, *args: Any, **kwargs: Any) -> Any:
            note(actual, expected)
            return function(actual, expected, *args, **kwargs)

        return call

    with (
        replaced(torch.testing, assert_close=observing(torch.testing.assert_close)),
        replaced(torch, allclose=observing(torch.allclose)),
    ):
        yield


@contextlib.contextmanager
def _shifted_seeds(offset: int) -> Iterator[None]:
    """Examples seed torch with a constant: add `offset`, so that each run has its own inputs."""
    import torch
    from warpcheck.host.replaced import replaced

    manual_seed = torch.manual_seed
    with replaced(torch, manual_seed=lambda seed: manual_seed(seed + offset)):
        yield


def _run_script(
    example: Example, cutlass: Path, outcome: Outcome, inputs: int, order: Order, others: list[Order]
) -> bool:
    """One run of the example's script. True when every repeated launch left the same bits."""
    from warpcheck import emulate

    with emulate(example.chip, sms=_SMS, seed=order[0], schedule=order[1]) as gpu:
        gpu.repeat(others)
        printed = io.StringIO()
        with _observed_comparisons(outcome), _shifted_seeds(inputs), contextlib.redirect_stdout(printed):
            example.run(cutlass)
        report = gpu.report()
    if example.printed_error:
        errors = [float(error) for error in re.findall(example.printed_error, printed.getvalue())]
        outcome.comparisons += len(errors)
        outcome.error, outcome.absolute = max([outcome.error, *errors]), True
    if not outcome.comparisons:
        raise AssertionError("the example compared nothing with a reference")
    outcome.launches = len(report.launches)
    outcome.instructions = report.warp_instructions
    outcome.seconds = sum(launch.seconds for launch in report.launches)
    return not any(launch.differs for launch in report.launches)


def run_example(example: Example, cutlass: Path, seeds: int, inputs: int) -> Outcome:
    """Run one example in every order of `seeds` seeds and all schedules; the first failure ends it."""
    outcome = Outcome(example.name)
    first, *others = [(seed, schedule) for seed in range(seeds) for schedule in SCHEDULES]
    try:
        if _run_script(example, cutlass, outcome, inputs, first, others):
            outcome.runs = 1 + len(others)
        else:
            outcome.runs, outcome.repeated = 1, True
            for order in others:
                _run_script(example, cutlass, outcome, inputs, order, [])
                outcome.runs += 1
    except SystemExit as exit_:
        outcome.failure = f"exit code {exit_.code}" if exit_.code else ""
    except Exception as error:
        text = str(error).strip().replace("\n", " / ")
        outcome.failure = f"{type(error).__name__}: {text[:600]}"
    return outcome


def _in_a_process(example: Example, cutlass: Path, seeds: int, inputs: int, timeout: float) -> Outcome:
    options = ["--cutlass", str(cutlass), "--seeds", str(seeds), "--inputs", str(inputs), "--one", example.name]
    command = [sys.executable, "-m", "warpcheck", "catalogue", *options]
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return Outcome(example.name, failure=f"not done after {timeout:.0f} s")
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            return Outcome(**json.loads(line))
    tail = (done.stderr.strip().splitlines() or ["no output"])[-1]
    return Outcome(
        example.name, failure=f"process ended with {done.returncode} after {time.perf_counter() - start:.0f} s: {tail}"
    )


TABLE_HEAD = """\
| kernel | chip | shape and options | runs | error | warp-instructions | seconds | result |
|---|---|---|---|---|---|---|---|"""


def table_row(outcome: Outcome, example: Example) -> str:
    """One example's results as a row under TABLE_HEAD."""
    options = " ".join(example.arguments)
    for noise in (r"--(warmup_)?iterations \d+", r"--tolerance \S+"):
        options = re.sub(noise, "", options)
    result = outcome.failure.split(" / ")[0] or ("right" if not outcome.repeated else "right, order-dependent bits")
    return (
        f"| {outcome.name} | {example.chip} | {' '.join(options.split())} | {outcome.runs} "
        f"| {outcome.error:.1e}{' abs' if outcome.absolute else ''} "
        f"| {outcome.instructions:,} | {outcome.seconds:.2f} | {result} |"
    )


def _run_packages(only: str, seeds: int, timeout: float, folder: Path | None) -> int:
    """Run the rows of `tests.emulator.public` that can run here; the exit code."""
    from tests.emulator.public import page, rows, run

    here, absent = run.installed(row for row in run.all_rows() if re.search(only, row.key))
    for package in absent:
        print(f"{package} is not installed: left out", file=sys.stderr)
    outcomes: list[rows.Outcome] = []

    def tell(outcome: rows.Outcome) -> None:
        outcomes.append(outcome)
        found = {severity.value: 0 for severity in Severity}
        for finding in outcome.findings:
            found[finding["severity"]] += 1
        told = ", ".join(f"{count} {severity}" for severity, count in found.items() if count)
        result = outcome.failure or "; ".join(outcome.wrong) or "right"
        print(f"{outcome.key}: {result}{f'; found {told}' if told else ''}", flush=True)
        if folder is not None:
            page.write(folder, outcomes, run.SHOWN)

    run.run_rows(here, seeds, timeout, tell)
    return int(not all(outcome.right for outcome in outcomes))


@click.command(help=__doc__)
@click.option("--cutlass", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--packages", is_flag=True, help="Kernels of packages that are installed, instead of NVIDIA's examples.")
@click.option(
    "--write",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder for the page of packages and its data; rows that were not run again stay.",
)
@click.option("--only", type=PATTERN, default="", help="Regular expression on the names of examples or calls.")
@click.option(
    "--seeds",
    type=COUNT,
    help="Each under every schedule [default: 5]; with --packages each under the next schedule [default: 3].",
)
@click.option("--inputs", type=int, help="Seed of the examples' inputs [default: fresh, printed].")
@click.option("--timeout", default=900.0, show_default=True, help="Seconds for all runs of one example.")
@click.option("--one", hidden=True, help="Run this example here and print its outcome as JSON.")
def main(
    cutlass: Path | None, packages: bool, write: Path | None, only: str, seeds: int | None, inputs: int | None,
    timeout: float, one: str | None,
) -> None:  # fmt: skip
    if packages:
        raise SystemExit(_run_packages(only, seeds or 3, timeout, write))
    if cutlass is None:
        raise click.UsageError("one of --cutlass PATH and --packages is needed")
    seeds = seeds or 5
    by_name = {example.name: example for example in EXAMPLES}
    inputs = random.SystemRandom().randrange(2**20) if inputs is None else inputs
    if one is not None:
        outcome = run_example(by_name[one], cutlass, seeds, inputs)
        print(f"\n{json.dumps(asdict(outcome))}", flush=True)
        return
    print(f"inputs: seed {inputs}", file=sys.stderr)
    print(TABLE_HEAD, flush=True)
    failures = 0
    for example in EXAMPLES:
        if re.search(only, example.name):
            outcome = _in_a_process(example, cutlass, seeds, inputs, timeout)
            print(table_row(outcome, example), flush=True)
            if outcome.failure:
                failures += 1
                print(f"{outcome.name}: {outcome.failure}", file=sys.stderr, flush=True)
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
