"""warpcheck verify: judge every candidate kernel of a directory, for programs that search for a fast one.

A candidate is a Python script that launches its kernels, compares their values with a reference, and ends with an
exception or an exit code other than 0 if they are wrong. Each runs in a process of its own:

1. in several orders, with all checks: values, findings, bytes that depend on the order;
2. if it is clean, on the clock: predicted time;
3. if asked for, mutants of its synchronisation.

The verdict is "clean", "failed" (the script: its values are wrong, or it has another error), "findings",
"no launch", "timed out" or "crashed" (its process ended).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click

from warpcheck.findings import Severity
from warpcheck.machine import Order, interleavings
from warpcheck.options import CHIP, COUNT, LENGTH, NEW_FILE, check_torch

Row = dict[str, Any]
_LAST_LINES = 12  # of the output of a candidate that is not clean
_MUTANT_SEEDS = 2  # of each schedule


@dataclass(frozen=True)
class Judging:
    """How candidates are judged. mutants: how many of each, 0 for none. fail_on: severities that make one unclean."""

    chip: str
    orders: tuple[Order, ...]
    sms: int
    mutants: int
    seconds: float
    fail_on: tuple[str, ...]

    def judge(self, path: Path) -> Row:
        """Return the row of a candidate, which runs in another process and has at most `seconds`."""
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        started = time.monotonic()
        with tempfile.NamedTemporaryFile("r", prefix="warpcheck-verify-", errors="replace") as output:
            process = context.Process(target=_work, args=(sender, output.name, self, path))
            process.start()
            sender.close()
            row: Row = {"verdict": "timed out"}
            if receiver.poll(self.seconds):
                try:
                    row = receiver.recv()
                except EOFError:
                    row = {"verdict": "crashed"}
            process.kill()
            process.join()
            lines = output.read().splitlines()
        row = {"candidate": path.name, **row, "seconds": round(time.monotonic() - started, 2)}
        return row if row["verdict"] == "clean" else {**row, "output": lines[-_LAST_LINES:]}

    def row(self, path: Path) -> Row:
        """Run a candidate in this process."""
        from warpcheck.scripts import run_script

        outcome = run_script([str(path)], self.chip, self.orders, sms=self.sms)
        unclean = outcome.findings.of(*self.fail_on)
        row: Row = {
            "verdict": _verdict(outcome.exit_code, bool(unclean), len(outcome.launches)),
            "exit_code": outcome.exit_code,
            "launches": len(outcome.launches),
            "depends_on_order": any(launch.differs for launch in outcome.launches),
            "findings": json.loads(outcome.findings.to_json()),
        }
        if row["verdict"] == "clean":
            row["predicted"] = _or_reason(self._predicted, path)
            if self.mutants:
                row["mutants"] = _or_reason(self._mutants, path)
        return row

    def _predicted(self, path: Path) -> Row:
        """Return the predicted time on `sms` multiprocessors. Raises ValueError if the clock does not know the chip."""
        from warpcheck.timing.chips import TABLES
        from warpcheck.timing.command import Clocked, timed

        if self.chip not in TABLES:
            raise ValueError(f"chip is {self.chip}, expected one of {', '.join(TABLES)}: the clock has no table of it")
        exit_code, timing = timed([str(path)], Clocked(TABLES[self.chip], self.sms))
        if exit_code or timing is None:
            raise ValueError(f"on the clock the script ended with {exit_code}")
        return {"cycles": round(timing.cycles), "microseconds": round(timing.microseconds, 3), "sms": self.sms}

    def _mutants(self, path: Path) -> Row:
        """Judge mutants of the kernel that has the most of them."""
        from warpcheck.tools.mutate import drawn, prepare, reached_mutants, record_script, recorded

        recordings = recorded([partial(record_script, (str(path),), self.chip, self.sms)], None)
        trial = prepare(recordings, sms=self.sms, seeds=_MUTANT_SEEDS)
        verdicts = [trial.judge(mutant) for mutant in drawn(reached_mutants(trial), self.mutants, seed=0)]
        survivors = [str(verdict.mutant) for verdict in verdicts if not verdict.how]
        return {"judged": len(verdicts), "killed": len(verdicts) - len(survivors), "survivors": survivors}


def _or_reason(part: Callable[[Path], Row], path: Path) -> Row:
    """Return what the part returns, or why it cannot. Assemblers and compilers raise errors of any type."""
    try:
        return part(path)
    except Exception as error:
        traceback.print_exc()
        return {"reason": f"{type(error).__name__}: {error}"}


def _verdict(exit_code: int, unclean: bool, launches: int) -> str:
    if exit_code:
        return "failed"
    if unclean:
        return "findings"
    return "clean" if launches else "no launch"


def _work(sender: Connection, output: str, judging: Judging, path: Path) -> None:
    """Send the row of a candidate, whose output goes to a file."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    sys.stdout.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    row = judging.row(path)
    sys.stdout.flush()
    sender.send(row)


def best(rows: Sequence[Row]) -> str | None:
    """Return the clean candidate with the least predicted time; None if there is none."""
    timed = [row for row in rows if "microseconds" in row.get("predicted", {})]
    return min(timed, key=lambda row: row["predicted"]["microseconds"])["candidate"] if timed else None


def _line(row: Row) -> str:
    words = [f"{row['candidate']}: {row['verdict']}"]
    if row["verdict"] == "findings":
        words[0] += " " + ", ".join(sorted({finding["kind"] for finding in row["findings"]}))
    predicted, mutants = row.get("predicted", {}), row.get("mutants", {})
    if "microseconds" in predicted:
        words.append(f"predicted {predicted['microseconds']:,.2f} us on {predicted['sms']} SMs")
    if "judged" in mutants:
        words.append(f"{mutants['killed']} of {mutants['judged']} mutants told")
    words += [part["reason"].strip().splitlines()[-1] for part in (predicted, mutants) if "reason" in part]
    if row.get("depends_on_order"):
        words.append("bytes depend on the order")
    return "; ".join(words)


@click.command("verify")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--chip", type=CHIP, default="sm_100a", show_default=True)
@click.option("--seeds", type=COUNT, default=6, show_default=True, help="In how many orders every launch is run.")
@click.option("--seed", default=0, show_default=True, help="Of the first order.")
@click.option("--sms", type=COUNT, default=4, show_default=True, help="Multiprocessors of the chip.")
@click.option("--mutants", type=LENGTH, default=0, show_default=True, help="Mutants of each clean candidate.")
@click.option("--limit", type=click.FloatRange(min=0, min_open=True), default=600.0, show_default=True,
              help="Seconds that a candidate has.")  # fmt: skip
@click.option("--fail-on", type=click.Choice([severity.value for severity in Severity]), multiple=True,
              default=["error"], show_default=True, help="Severities that make a candidate unclean.")  # fmt: skip
@click.option("--json", "json_path", type=NEW_FILE, help="Write the verdicts as JSON.")
def main(
    directory: Path, chip: str, seeds: int, seed: int, sms: int, mutants: int, limit: float, fail_on: tuple[str, ...],
    json_path: str | None,
) -> None:  # fmt: skip
    """Judge every script *.py of DIRECTORY, except those that begin with an underscore: values, findings, mutants,
    predicted time.

    The exit code is 0 if all are clean, else 1. Needs torch.
    """
    check_torch()
    paths = sorted(path.resolve() for path in directory.glob("*.py") if not path.name.startswith("_"))
    if not paths:
        raise click.BadParameter(f"{str(directory)!r} has no script *.py", param_hint="DIRECTORY")
    judging = Judging(chip, tuple(interleavings(seed, seeds)), sms, mutants, limit, fail_on)
    rows = []
    for path in paths:
        rows.append(judging.judge(path))
        click.echo(_line(rows[-1]))
    fastest = best(rows)
    if json_path is not None:
        whole = {"chip": chip, "sms": sms, "seed": seed, "seeds": seeds, "best": fastest, "candidates": rows}
        Path(json_path).write_text(json.dumps(whole, indent=1) + "\n")
    click.echo(f"best: {fastest}" if fastest else "no candidate is clean and has a predicted time")
    raise SystemExit(int(any(row["verdict"] != "clean" for row in rows)))


if __name__ == "__main__":
    main()
