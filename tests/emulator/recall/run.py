"""Run the faults, each in a process of its own, and write a row for each.

    python -m tests.emulator.recall.run [--only PATTERN] [--orders N] [--into ROWS.jsonl]

A row of a problem (`fault` is null) is that of the package as it is. A fault is found if an error is told that the
package as it is does not have; the run of a fault ends with the first order that shows it.
"""

from __future__ import annotations

import fnmatch
import json
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import click
from warpcheck.findings import Finding, Findings, Severity
from warpcheck.machine import Checks, interleavings

from examples.findings.edited_package import use_edited
from tests.emulator.recall.corpus import FAULTS, PROBLEMS
from tests.emulator.recall.faults import Fault, Problem

ROOT = Path(__file__).parents[3]
ORDERS = 12
_MARK = "row of a fault: "
_TOPS = ("cudnn", "flash_attn", "quack", "cutlass")  # packages whose files are named from there
Row = dict[str, Any]


def run_one(problem: Problem, fault: Fault | None, orders: int, known: set[str]) -> Row:
    """Run a problem in a process that has not imported its package. known: errors of the package as it is."""
    from warpcheck import emulate

    package = problem.package
    use_edited(package.module, package.version, fault.edits if fault else ())
    row: Row = {
        "fault": fault.name if fault else None, "problem": problem.name, "package": package.distribution,
        "version": package.version, "chip": problem.chip, "orders": 0, "errors": [], "other": 0, "wrong": False,
        "failure": "",
    }  # fmt: skip
    started = time.perf_counter()
    told: list[Finding] = []
    for seed, schedule in interleavings(0, orders):
        with emulate(problem.chip, sms=problem.sms, seed=seed, schedule=schedule, on_finding="collect",
                     checks=Checks(leftovers=problem.leftovers), tells_devices_apart=True) as gpu:  # fmt: skip
            try:
                judgements = problem.run(seed)
                row["wrong"] |= any(not judgement.right for judgement in judgements)
                if not judgements:
                    row["failure"] = "nothing was compared"
            except Exception as error:
                row["failure"] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
            told += gpu.findings
        row["orders"] += 1
        if row["orders"] == 1:
            row["instructions"] = sum(launch.warp_instructions for launch in gpu.launches)
        if fault and any(key(finding) not in known for finding in told if finding.severity is Severity.ERROR):
            row["order"] = [seed, schedule]
            break
        if row["failure"]:
            break
    row["seconds"] = round(time.perf_counter() - started, 1)
    for finding in Findings.merged(told):
        if finding.severity is not Severity.ERROR:
            row["other"] += 1
        elif key(finding) not in known:
            row["errors"].append({"key": key(finding), "kind": finding.kind, "told": finding.message.splitlines()[0]})
    return row


def key(finding: Finding) -> str:
    """Kind and place of a finding. Edits keep line numbers, so that the key is that of the package as it is."""
    location = finding.location or next((place for _, place in finding.others if place), None)
    return f"{finding.kind} {_place(location)}"


def _place(location: Any) -> str:
    if location is None or location.file is None:
        return "-"
    parts = Path(location.file).parts
    start = max((i for i, part in enumerate(parts) if part in _TOPS), default=-1)
    return f"{'/'.join(parts[start:])}:{location.line}"


def run_apart(problem: Problem, fault: Fault | None, orders: int, known: set[str], timeout: float) -> Row:
    """`run_one` in a process of its own."""
    names = json.dumps([problem.name, fault.name if fault else None, orders, sorted(known)])
    command = [sys.executable, "-m", "tests.emulator.recall.run", "--apart", names]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
        for line in done.stdout.splitlines():
            if line.startswith(_MARK):
                return dict(json.loads(line.removeprefix(_MARK)))
        failure = f"ended with {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1][:300]}"
    except subprocess.TimeoutExpired:
        failure = f"not done after {timeout:.0f} s"
    return {
        "fault": fault.name if fault else None, "problem": problem.name, "package": problem.package.distribution,
        "version": problem.package.version, "chip": problem.chip, "orders": 0, "errors": [], "other": 0,
        "wrong": False, "failure": failure, "seconds": round(time.perf_counter() - started, 1),
    }  # fmt: skip


def installed(problem: Problem) -> bool:
    """True if the version of the package for which the edits are written is installed."""
    try:
        return metadata.version(problem.package.distribution) == problem.package.version
    except metadata.PackageNotFoundError:
        return False


@click.command()
@click.option("--only", default="*", help="Names of problems or faults, as a shell pattern.")
@click.option("--orders", default=ORDERS, show_default=True)
@click.option("--timeout", default=600.0, show_default=True, help="Seconds of a process.")
@click.option("--into", type=click.Path(path_type=Path), help="Rows are replaced here [default: printed alone].")
@click.option("--apart", hidden=True)
def main(only: str, orders: int, timeout: float, into: Path | None, apart: str | None) -> None:
    """Run the problems of the installed packages as they are, then their faults."""
    if apart:
        problem_name, fault_name, orders, known = json.loads(apart)
        fault = FAULTS[fault_name] if fault_name else None
        click.echo("\n" + _MARK + json.dumps(run_one(PROBLEMS[problem_name], fault, orders, set(known))))
        return
    rows = read(into) if into and into.exists() else []
    for problem in PROBLEMS.values():
        faults = [fault for fault in FAULTS.values() if fault.problem.name == problem.name]
        chosen = [fault for fault in faults if fnmatch.fnmatch(fault.name, only)]
        whole = fnmatch.fnmatch(problem.name, only)
        if not (chosen or whole):
            continue
        if not installed(problem):
            click.echo(f"{problem.name}: {problem.package.distribution} {problem.package.version} is not installed")
            continue
        right = next((row for row in rows if row["problem"] == problem.name and row["fault"] is None), None)
        if whole or right is None:
            right = _keep(rows, run_apart(problem, None, min(orders, 4), set(), timeout), into)
        for fault in faults if whole else chosen:
            _keep(rows, run_apart(problem, fault, orders, {error["key"] for error in right["errors"]}, timeout), into)


def _keep(rows: list[Row], row: Row, into: Path | None) -> Row:
    click.echo(json.dumps(row))
    rows[:] = [old for old in rows if (old["problem"], old["fault"]) != (row["problem"], row["fault"])] + [row]
    if into:
        into.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return row


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


if __name__ == "__main__":
    main()
