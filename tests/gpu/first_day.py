"""python -m tests.gpu.first_day: tests and measurements on a chip that has not run these kernels, and one report.

The report is a folder with the environment, the log of each step, rows of measurements and plots. Steps run in order,
cheap and telling ones first. Each step has a process of its own, so that a step that breaks the CUDA context does not
end the run. The exit code is 1 if a step failed. --dry-run needs no GPU: it collects the GPU tests, runs tiled torch
on small problems, and writes the same report.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from bench import machine
from fa4.cli.main import environment
from fa4.runtime.device import chip_of
from tests.gpu.offered import offered

ROOT = Path(__file__).parents[2]
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m")
_COLUMNS = "120"  # of the tables in logs


@dataclass(frozen=True)
class Step:
    """One check. `command` is arguments of this Python; `{report}` in it stands for the folder of the report.

    under: a tool that runs the command.
    backend: the step is for chips that offer this backend; "" for any chip.
    dry: the command of --dry-run. Without one, GPU tests are collected, and other steps are left out.
    """

    name: str
    why: str
    command: tuple[str, ...]
    under: tuple[str, ...] = ()
    backend: str = ""
    dry: tuple[str, ...] = ()

    def dry_command(self) -> tuple[str, ...]:
        if self.dry or self.command[:2] != _PYTEST[:2]:
            return self.dry
        return (*self.command, "--collect-only")


_ENVIRONMENT = ("-m", "fa4", "env")
_TUNE = ("-m", "bench.tune", "--chip", "100", "--suite", "sm100", "--output", "{report}/rows/tune.jsonl", "--filter")
_TIMES = "{report}/rows/times.jsonl"
_RUN = ("-m", "bench.run", "--output", _TIMES, "--suite")
_PLOT = ("-m", "bench.plot", _TIMES, "--output", "{report}/plots/times.png")
_SUMMARY = ("-m", "bench.summary", _TIMES)

STEPS = (
    Step("environment", "what is installed, which backends run", _ENVIRONMENT, dry=_ENVIRONMENT),
    Step("opcodes", "instructions do what the emulator says they do", ("-m", "warpcheck", "compare")),
    Step("forward", "every named case against the oracle", (*_PYTEST, "gpu", "tests/gpu/test_cases.py::test_forward"),
         dry=(*_PYTEST, "not soak", "tests/test_fallback.py::test_case_is_right", "-k", "gqa and not sink")),
    Step(
        "memcheck", "no access out of bounds, on one case per kind of kernel",
        (*_PYTEST, "gpu", "tests/gpu/test_cases.py::test_gradients", "-k", "causal_d128 or varlen_different_k"),
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
    Step("times", "fa4 and every installed peer, checked before timed", (*_RUN, "sm100"),
         dry=(*_RUN, "tiny", "--device", "cpu", "--seconds", "0.01")),
    Step("plots", "TFLOP/s over seqlen", _PLOT, dry=_PLOT),
    Step("summary", "tables of TFLOP/s and of ratios", _SUMMARY, dry=_SUMMARY),
)  # fmt: skip


def steps_for(backends: tuple[str, ...]) -> list[Step]:
    """The steps for a chip that offers `backends`."""
    return [step for step in STEPS if not step.backend or step.backend in backends]


def refusal() -> str:
    """Why the kernels cannot run on this machine; "" if they can."""
    if not torch.cuda.is_available():
        found = f"torch {torch.__version__} finds none"
        if torch.version.cuda is None:
            found += " (it is built without CUDA)"
    elif not offered():
        found = f"this one is {chip_of(torch.device('cuda'))}"
    else:
        return ""
    return (
        f"make first-day needs an NVIDIA GPU of compute capability 8.0 or newer, and {found}. "
        "--dry-run needs no GPU (make first-day FLAGS=--dry-run); --list shows the steps."
    )


def issues_url() -> str:
    """Where reports are sent: [project.urls] of pyproject.toml, which is the only place with addresses."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Issues"]


@dataclass
class Report:
    """A folder: environment.json, steps.json, report.md, logs/, rows/, plots/."""

    folder: Path
    title: str
    commit: str
    results: list[dict]

    def make(self) -> None:
        for name in ("logs", "rows", "plots"):
            (self.folder / name).mkdir(parents=True)

    def add(self, step: Step, result: str, seconds: float = 0.0, log: str = "") -> None:
        """Note what came of a step, and write the report as far as it is: a later step may stop the machine."""
        self.results.append(
            {"step": step.name, "checks": step.why, "result": result, "seconds": round(seconds), "log": log}
        )
        (self.folder / "steps.json").write_text(json.dumps(self.results, indent=2) + "\n")
        lines = [f"# {self.title}", "", f"Commit {self.commit}.", "", "| step | checks | result | seconds | log |",
                 "|---|---|---|--:|---|"]  # fmt: skip
        lines += [f"| {' | '.join(str(cell) for cell in row.values())} |" for row in self.results]
        plots = sorted(path.name for path in (self.folder / "plots").iterdir())
        lines += ["", *(f"![{name}](plots/{name})" for name in plots)]
        (self.folder / "report.md").write_text("\n".join(lines).rstrip() + "\n")

    @property
    def failed(self) -> bool:
        return any(row["result"].startswith(("FAILED", "interrupted")) for row in self.results)

    def table(self) -> Table:
        table = Table("step", "result", "seconds", title=self.title)
        for row in self.results:
            table.add_row(row["step"], row["result"], str(row["seconds"]))
        return table


def run(command: list[str], log: Path) -> int:
    """Run a command in the checkout; its output goes to the terminal and to a log. Returns the exit code."""
    env = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": _COLUMNS}
    with log.open("w") as file:
        file.write(f"$ {shlex.join(command)}\n")
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, errors="replace", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sys.stdout.write(line)
                file.write(line)
        except KeyboardInterrupt:  # the child gets the signal, too; what it still says belongs to the log
            file.write(process.communicate()[0] or "")
            raise
        return process.wait()


def take(step: Step, number: int, report: Report, dry: bool) -> None:
    command = step.dry_command() if dry else step.command
    under = () if dry else step.under
    if not command:
        return report.add(step, "left out of a dry run")
    if under and shutil.which(under[0]) is None:
        return report.add(step, f"left out: {under[0]} is not installed")
    words = [word.replace("{report}", str(report.folder)) for word in command]
    log = f"logs/{number:02}-{step.name.replace(', ', '-').replace(' ', '-')}.txt"
    start = time.perf_counter()
    try:
        code = run([*under, sys.executable, *words], report.folder / log)
    except KeyboardInterrupt:
        report.add(step, "interrupted", time.perf_counter() - start, log)
        raise
    report.add(step, "ok" if code == 0 else f"FAILED ({code})", time.perf_counter() - start, log)


def new_report(folder: Path | None, dry: bool) -> Report:
    device = "dry run" if dry else torch.cuda.get_device_name()
    now = datetime.datetime.now()
    if folder is None:
        folder = Path("first-day") / f"{now:%Y-%m-%d-%H%M%S}-{machine.slug(device)}"
    commit = machine.commit()
    chip = "a CPU (dry run)" if dry else f"{device}, {chip_of(torch.device('cuda'))}"
    report = Report(folder.resolve(), f"First day on {chip}, {now:%Y-%m-%d}", commit, [])
    try:
        report.make()
    except FileExistsError:
        raise click.BadParameter(f"{folder} has a report", param_hint="--report") from None
    facts = machine.facts(torch.device("cpu" if dry else "cuda"))
    found = {"commit": commit, **environment(), "machine": facts, "clocks": machine.clocks()}
    (report.folder / "environment.json").write_text(json.dumps(found, indent=2) + "\n")
    return report


@click.command(help=__doc__)
@click.option("--only", multiple=True, help="Steps whose name contains this; may be repeated.")
@click.option("--list", "list_only", is_flag=True, help="Print the steps and their commands, run nothing.")
@click.option("--dry-run", "dry", is_flag=True, help="Run on a CPU what does not need a GPU.")
@click.option(
    "--report", "folder", type=click.Path(path_type=Path), help="Default: first-day/<date>-<gpu> in this directory."
)
def main(only: tuple[str, ...], list_only: bool, dry: bool, folder: Path | None) -> None:
    console = Console(soft_wrap=True, highlight=False)
    chosen = [step for step in steps_for(offered()) if not only or any(part in step.name for part in only)]
    if list_only:
        for step in chosen:
            console.print(f"{step.name}: {step.why}\n    {shlex.join((*step.under, 'python', *step.command))}")
        return
    reason = "" if dry else refusal()
    if reason:
        raise click.ClickException(reason)
    report = new_report(folder, dry)
    try:
        for number, step in enumerate(chosen, 1):
            console.rule(f"{step.name}: {step.why}")
            take(step, number, report, dry)
    except KeyboardInterrupt:
        console.print("interrupted: the report has the steps so far")
    console.print(report.table())
    console.print(f"report: {report.folder}\nIt names paths and versions of this machine: read it before you send it.")
    if not dry:
        archive = shutil.make_archive(str(report.folder), "zip", report.folder)
        console.print(f"Send {archive} to {issues_url()}")
    raise SystemExit(report.failed)


if __name__ == "__main__":
    main()
