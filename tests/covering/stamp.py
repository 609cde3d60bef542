"""The note of the last whole run on each chip: which arrays, when, at which commit, with what result."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

from tests.covering.arrays import ARRAYS
from tests.covering.run import Where

FILE = Path(__file__).parent / "stamp.json"


def digests(chip: str) -> dict[str, str]:
    """Of the arrays for a chip."""
    return {name: ARRAYS[name].digest() for name in Where(chip).arrays}


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


def write(chip: str, seed: int, counts: dict[str, int], wrong: list[str]) -> None:
    """Replace a chip's note."""
    note = dict(
        device=device_name(chip),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=_commit(),
        arrays=digests(chip),
        seed=seed,
        rows=counts,
        wrong=wrong,
    )
    FILE.write_text(json.dumps(read() | {chip: note}, indent=1, sort_keys=True) + "\n")
