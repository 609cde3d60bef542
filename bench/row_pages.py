"""Pages that are made from committed rows."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from .curves import RESULTS


def wrapped(part: str) -> str:
    """Return a paragraph in lines of the pages' width; other parts as they are."""
    return (
        part
        if part.startswith(("|", "#", "*"))
        else textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False)
    )


def rows_by_file(pattern: str, further: str | None = None) -> dict[str, list[dict]]:
    """Return the committed rows of the files of a pattern, the newest first, then of another one, by file name."""
    found = [*sorted(RESULTS.glob(pattern), reverse=True), *(sorted(RESULTS.glob(further)) if further else ())]
    return {file.name: rows_of(file) for file in found}


def rows_of(file: Path) -> list[dict]:
    """Return the rows of a file of any benchmark; `compare.read_rows` also checks that they are of bench.run."""
    return [json.loads(line) for line in file.read_text().splitlines()]
