"""Notes of the last whole run of each array on each chip: when, at which commit, with what result."""

from __future__ import annotations

import collections
import datetime
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.covering.arrays import ARRAYS
from tests.covering.run import Outcome

FILE = Path(__file__).parent / "stamp.json"


def device_name(chip: str) -> str:
    """What ran the calls."""
    if chip == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return "CPU" if chip == "torch" else f"{chip}, emulated"


def _commit() -> str:
    """Of the working tree; with "-dirty" where its files differ from the commit, the notes apart."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=FILE.parent, capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse", "--short=10", "HEAD")
    if not commit:
        return "unknown"
    changed = git("status", "--porcelain", "--", ":/", f":!{FILE.name}")
    return f"{commit}-dirty" if changed else commit


def read() -> dict[str, Any]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def write(chip: str, seed: int, outcomes: Iterable[Outcome]) -> None:
    """Replace the notes of the arrays whose rows all have an outcome."""
    of_arrays = collections.defaultdict[str, list[Outcome]](list)
    for outcome in outcomes:
        of_arrays[outcome.label.partition(":")[0]].append(outcome)
    notes = read()
    for name, rows in of_arrays.items():
        if len(rows) == len(ARRAYS[name].rows()):
            notes.setdefault(chip, {})[name] = dict(
                device=device_name(chip),
                date=datetime.datetime.now(datetime.UTC).date().isoformat(),
                commit=_commit(),
                digest=ARRAYS[name].digest(),
                seed=seed,
                rows=collections.Counter(row.status for row in rows),
                wrong=[f"{row.label}: {row.status}" for row in rows if row.status != "right"],
            )
    FILE.write_text(json.dumps(notes, indent=1, sort_keys=True) + "\n")
