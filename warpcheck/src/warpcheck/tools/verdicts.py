"""Verdicts on mutants: as a table, and as a file from which an interrupted run continues."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from warpcheck.machine.ptx import parse
from warpcheck.tools.explained import reason_of
from warpcheck.tools.mutations import Mutant
from warpcheck.tools.recording import Recording


@dataclass(frozen=True)
class Verdict:
    """Verdict on a mutant. how: name of the error, "wrong result", or "" for a survivor. runs: number of runs."""

    mutant: Mutant
    how: str
    runs: int


class Ledger:
    """Verdicts in a file of JSON lines, so that no mutant is judged twice.

    `under`: the conditions of a verdict in addition to the mutant. Lines of other kernels, shapes or orders stay, and
    are not used.
    """

    def __init__(self, path: Path, under: Iterable[object]) -> None:
        self.path = path
        self._under = hashlib.sha256(repr(list(under)).encode()).hexdigest()[:16]
        self._verdicts: dict[str, tuple[str, int]] = {}
        for text in path.read_text().splitlines() if path.exists() else ():
            line = json.loads(text)
            if line["under"] == self._under:
                self._verdicts[line["mutant"]] = line["how"], line["runs"]

    def verdict_of(self, mutant: Mutant) -> Verdict | None:
        found = self._verdicts.get(str(mutant))
        return Verdict(mutant, *found) if found else None

    def note(self, verdict: Verdict) -> None:
        line = {"under": self._under, "mutant": str(verdict.mutant), "how": verdict.how, "runs": verdict.runs}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def summary(recording: Recording, verdicts: Sequence[Verdict]) -> str:
    """Return Markdown tables: mutants by kind, and survivors with reason and source location."""
    survivors = [verdict for verdict in verdicts if not verdict.how]
    reasons = {id(verdict): reason_of(verdict.mutant, recording.ptx) for verdict in survivors}
    lines = ["| kind | mutants | killed | by | explained |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(verdict.mutant.kind for verdict in verdicts):
        mine = [verdict for verdict in verdicts if verdict.mutant.kind == kind]
        ways = Counter(verdict.how for verdict in mine if verdict.how)
        by = ", ".join(f"{how} {count}" for how, count in ways.most_common())
        why = Counter(reason for verdict in mine if (reason := reasons.get(id(verdict))))
        explained = "; ".join(f"{reason}: {count}" for reason, count in why.most_common())
        lines.append(f"| {kind} | {len(mine)} | {sum(ways.values())} | {by} | {explained} |")
    killed = [verdict for verdict in verdicts if verdict.how]
    share = len(killed) / len(verdicts) if verdicts else 0.0
    at_once = sum(verdict.runs == 1 for verdict in killed)
    settled = len(killed) + sum(map(bool, reasons.values()))
    of_all = f"{settled / len(verdicts):.1%}" if verdicts else "0.0%"
    lines.append(
        f"| **all** | {len(verdicts)} | {len(killed)} ({share:.1%}) | {at_once} of them in the first run "
        f"| killed or explained: {settled} ({of_all}) |"
    )
    if survivors:
        locations = _source_locations(recording)
        lines += ["", "| survivor | runs | location | instruction | why |", "|---|---|---|---|---|"]
        for verdict in survivors:
            mutant, why_one = verdict.mutant, reasons[id(verdict)]
            location = locations.get(mutant.line, "")
            lines.append(f"| {mutant} | {verdict.runs} | {location} | `{mutant.before[:120]}` | {why_one} |")
    return "\n".join(lines)


def _source_locations(recording: Recording) -> dict[int, str]:
    """Line of the PTX -> Python file:line, where the text has line information."""
    module = parse(recording.ptx)
    locations = {}
    for instruction in module.kernels[recording.entry].instructions:
        location = module.location(instruction)
        if location.file is not None:
            locations[location.ptx_line] = f"{Path(location.file).name}:{location.line}"
    return locations
