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
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.table import Table

from bench import machine
from fa4.cli.main import environment
from fa4.cli.options import ChipNumber
from fa4.runtime import dispatch
from fa4.runtime.device import chip_by_number, chip_of
from tests.gpu.offered import offered

ROOT = Path(__file__).parents[2]
_PYTEST = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m")  # -rs: why tests are skipped
_COLUMNS = "120"  # of the tables in logs


@dataclass(frozen=True)
class Step:
    """One check. `command` is arguments of this Python; `{report}` in it stands for the folder of the report, `{suite}`
    for the suite of the chip.

    under: a tool that runs the command.
    backend: the step is for chips that offer this backend; "" for any chip.
    gib: memory that the GPU must have.
    dry: the command of --dry-run. Without one, GPU tests are collected, and other steps are left out.
    """

    name: str
    why: str
    command: tuple[str, ...]
    under: tuple[str, ...] = ()
    backend: str = ""
    gib: int = 0
    dry: tuple[str, ...] = ()

    def dry_command(self) -> tuple[str, ...]:
        if self.dry or self.command[:2] != _PYTEST[:2]:
            return self.dry
        return (*self.command, "--collect-only")


_ENVIRONMENT = ("-m", "fa4", "env")
_TUNE = ("-m", "bench.tune", "--chip", "100", "--suite", "sm100", "--output", "{report}/rows/tune.jsonl", "--filter")
_TIMES = "{report}/rows/times.jsonl"
_RUN = ("-m", "bench.run", "--output", _TIMES, "--suite")
_SQUARE_16_BITS = r" \d+ b?float\d+$"  # lines over seqlen: no cross-attention, no mxfp8
_PLOT = ("-m", "bench.plot", _TIMES, "--output", "{report}/plots/times.png", "--filter", _SQUARE_16_BITS)
_SUMMARY = ("-m", "bench.summary", _TIMES)
_ARRAYS = ("-m", "tests.covering", "--device", "cuda", "--jobs", "4", "--out")  # each process has a context
_EMULATED_ROWS = ("-m", "tests.covering", "--chip", "sm_120a", "--seed", "1", "--row")
_SUITES = {"sm120": "consumer"}  # of the backend that a chip prefers; others: sm100

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
    Step("caches, functions", "key/value caches, score_mod, mask_mod and dropout",
         (*_PYTEST, "gpu", "tests/gpu/test_kvcache.py", "tests/gpu/test_mods.py", "tests/gpu/test_dropout.py"),
         backend="sm120"),
    Step("8-bit calls", "calls on e4m3 and e2m1 tensors with all kinds of scales, and training that rounds to 8 bits",
         (*_ARRAYS, "{report}/rows/8-bit-calls.jsonl", "--array", "eight-bits", "--array", "eight-bits-scaled",
          "--array", "training-in-eight-bits", "--array", "four-bits"),
         backend="sm120", gib=6, dry=(*_EMULATED_ROWS, "eight-bits-scaled:2")),
    Step("rows, causal", "schedules against each other", (*_TUNE, "d128 causal b4 "), backend="sm100"),
    Step("rows, full", "single CTAs against pairs", (*_TUNE, "d128 full b4 "), backend="sm100"),
    Step("overhead", "host time of a call", ("-m", "bench.overhead")),
    Step("times", "fa4 and every installed peer, checked before timed", (*_RUN, "{suite}"), gib=6,
         dry=(*_RUN, "tiny", "--device", "cpu", "--seconds", "0.01")),
    Step("plots", "TFLOP/s over seqlen", _PLOT, dry=_PLOT),
    Step("summary", "tables of TFLOP/s and of ratios", _SUMMARY, dry=_SUMMARY),
    Step("e4m3 times", "forwards on e4m3 tensors, their errors, and bfloat16",
         ("-m", "bench.fp8", "--output", "{report}/rows/e4m3.jsonl"), backend="sm120", gib=6),
    Step("arrays", "calls with every pair of options; takes longest",
         (*_ARRAYS, "{report}/rows/arrays.jsonl"), backend="sm120", gib=6, dry=(*_EMULATED_ROWS, "training:0")),
)  # fmt: skip


def steps_for(backends: tuple[str, ...]) -> list[Step]:
    """The steps for a chip that offers `backends`, in order of preference."""
    suite = _SUITES.get(next(iter(backends), ""), "sm100")
    return [
        replace(step, command=tuple(word.replace("{suite}", suite) for word in step.command))
        for step in STEPS
        if not step.backend or step.backend in backends
    ]


def backends_of(chip: int | None) -> tuple[str, ...]:
    """The backends with kernels for a chip; without a number, for the chip here, or all if there is none."""
    rows = [row for row in dispatch.BACKENDS if row.requires]
    if chip is not None or torch.cuda.is_available():
        where = chip_of(torch.device("cuda")) if chip is None else chip_by_number(chip)
        rows = [row for row in rows if row.on(where)]
    return tuple(dict.fromkeys(row.name for row in rows))


def lacks_memory(step: Step) -> str:
    """Why the GPU here is too small for a step; "" if it is not."""
    if not step.gib:
        return ""
    found = torch.cuda.get_device_properties().total_memory / 2**30
    return "" if found >= step.gib else f"needs a GPU with {step.gib} GiB of memory, and this one has {found:.1f}"


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
    reason = "" if dry else lacks_memory(step)
    if reason:
        return report.add(step, f"left out: {reason}")
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
@click.option("--chip", type=ChipNumber(), help="Of --list and --dry-run: the steps of this chip, such as sm_120a.")
@click.option("--dry-run", "dry", is_flag=True, help="Run on a CPU what does not need a GPU.")
@click.option(
    "--report", "folder", type=click.Path(path_type=Path), help="Default: first-day/<date>-<gpu> in this directory."
)
def main(only: tuple[str, ...], list_only: bool, chip: int | None, dry: bool, folder: Path | None) -> None:
    console = Console(soft_wrap=True, highlight=False)
    if chip is not None and not (list_only or dry):
        raise click.UsageError("--chip is given without --list or --dry-run")
    try:
        backends = backends_of(chip)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--chip") from None
    chosen = [step for step in steps_for(backends) if not only or any(part in step.name for part in only)]
    if list_only:
        for step in chosen:
            memory = f" (needs a GPU with {step.gib} GiB)" if step.gib else ""
            console.print(f"{step.name}: {step.why}{memory}\n    {shlex.join((*step.under, 'python', *step.command))}")
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
