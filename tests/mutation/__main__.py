"""Plants mistakes of value and logic in the package's Python, one at a time in a copy of the tree, and runs the tests
that answer for the file (tests/mutation/areas.py). Prints a table by area, and each survivor as a diff with the command
that plants it again.
"""

from __future__ import annotations

import random
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path

import click

from tests.mutation.areas import AREAS, Area, area_of, real
from tests.mutation.plant import Mutant, mutants, record_fields
from tests.mutation.reach import Known, Reach, statement
from tests.mutation.whole import Whole, device_files, is_device
from tests.mutation.workshop import Outcome, Red, Workshop

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of mutant `number` of a seed's order."""

    number: int
    mutant: Mutant
    area: Area
    outcome: Outcome


def package_files(root: Path = ROOT) -> list[str]:
    """Every Python file of the package but the emulator's."""
    found = sorted(path.relative_to(root).as_posix() for path in (root / "fa4").rglob("*.py"))
    return [path for path in found if not path.startswith("fa4/emulator/")]


def in_order(root: Path, seed: int, areas: Sequence[str], files: Sequence[str]) -> list[tuple[Area, Mutant]]:
    """All mutants in the order of a seed, the areas in turn."""
    sources = {path: (root / path).read_bytes() for path in package_files(root)}
    fields = record_fields(sources)
    by_area: dict[Area, list[Mutant]] = {area: [] for area in AREAS if not areas or area.name in areas}
    for path, source in sources.items():
        if area_of(path) in by_area and (not files or path in files):
            by_area[area_of(path)] += real(mutants(path, source, fields), source)
    for area, found in by_area.items():
        random.Random(f"{seed} {area.name}").shuffle(found)
    rounds = zip_longest(*([(area, mutant) for mutant in found] for area, found in by_area.items()))
    return [one for one in chain.from_iterable(rounds) if one is not None]


def summary(verdicts: Sequence[Verdict]) -> str:
    """A Markdown table by area."""
    lines = ["| area | mutants | killed | by |", "|---|---|---|---|"]
    for name in [*dict.fromkeys(verdict.area.name for verdict in verdicts), ""]:
        mine = [verdict for verdict in verdicts if name in ("", verdict.area.name)]
        ways = Counter(verdict.outcome.how.split("::")[0] for verdict in mine if verdict.outcome.how)
        by = ", ".join(f"{how} {count}" for how, count in ways.most_common(4))
        share = ways.total() / max(len(mine), 1)
        lines.append(f"| {name or '**all**'} | {len(mine)} | {ways.total()} ({share:.0%}) | {by if name else ''} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option(
    "--seed", default=0, show_default=True, help="Decides which mutants, in which order, and the tests' data."
)
@click.option("--count", default=50, show_default=True, help="How many mutants.")
@click.option("--start", default=0, show_default=True, help="Number of the first one in the seed's order.")
@click.option("--minutes", default=0.0, help="Start no further mutant after so long.")
@click.option("--enough", default=600.0, show_default=True, help="Processor seconds of kernels' tests for one mutant.")
@click.option("--only", type=int, help="The one mutant of this number.")
@click.option("--area", "areas", multiple=True, type=click.Choice([area.name for area in AREAS]), help="Only these.")
@click.option("--file", "files", multiple=True, help="Only these files, as fa4/api/dense.py.")
@click.option("--device", is_flag=True, help="Only device code; tests by what `tests.mutation.whole` has measured.")
@click.option("--list", "listed", is_flag=True, help="Show the mutants and run nothing.")
def main(
    seed: int, count: int, start: int, minutes: float, enough: float, only: int | None, areas: tuple[str, ...],
    files: tuple[str, ...], device: bool, listed: bool,
) -> None:  # fmt: skip
    numbers = range(start, start + count) if only is None else range(only, only + 1)
    order = in_order(ROOT, seed, areas, device_files() if device and not files else files)
    chosen = [(number, *order[number]) for number in numbers if number < len(order)]
    again = " ".join(["python -m tests.mutation --seed", str(seed), *(f"--area '{name}'" for name in areas),
                      *(f"--file {path}" for path in files), *["--device"] * device, "--only"])  # fmt: skip
    if listed:
        for number, _, mutant in chosen:
            click.echo(f"{again} {number}\n{mutant}\n{mutant.diff((ROOT / mutant.path).read_bytes())}")
        return
    verdicts: list[Verdict] = []
    judges: dict[Area, Judge | None] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fa4-mutation-") as scratch:
        workshop = Workshop(ROOT, Path(scratch), seed)
        for number, area, mutant in chosen:
            if minutes and time.monotonic() - started > 60 * minutes:
                break
            if area not in judges:
                judges[area] = _judge_of(workshop, area, enough)
            if (judge := judges[area]) is None:
                continue
            try:
                outcome = judge.of(mutant)
            except Red as error:
                click.echo(f"{area.name}: {error}", err=True)
                judges[area] = None
                continue
            verdicts.append(Verdict(number, mutant, area, outcome))
            click.echo(f"{number:4d} {outcome.seconds:5.0f} s  {mutant}  {outcome.how or 'SURVIVED'}", err=True)
            if not outcome.how:
                click.echo(f"survived: {again} {number}\n{mutant.diff(workshop.source(mutant.path))}")
    click.echo(summary(verdicts))
    click.echo(f"\n{time.monotonic() - started:.0f} s, seed {seed}, {len(order)} mutants in all")
    red = [area.name for area, judge in judges.items() if judge is None]
    if red:
        raise click.ClickException(f"the tests of {', '.join(red)} fail without any mutant")


class Judge:
    """Shows mutants to the tests of an area.

    Raises:
        Red: the tests fail as it is, and can judge nothing.
    """

    def __init__(self, workshop: Workshop, area: Area, enough: float) -> None:
        self.workshop, self.area, self.enough = workshop, area, enough
        self.whole = Whole(workshop.root)
        self.usual = workshop.unspoilt(area.tests) if area.tests else Outcome("", 0.0, 0.0)
        self.known = Known(workshop.root / "build" / "mutation" / "reach.json")

    def of(self, mutant: Mutant) -> Outcome:
        outcome, shown = Outcome("", 0.0, 0.0), []
        if self.area.tests:
            outcome = self.workshop.judge(mutant, self.area.tests, self.usual)
        lines = statement(self.workshop.source(mutant.path), mutant.line)
        if is_device(mutant.path) and self.whole.holds(mutant.path):
            return self._by_measured_reach(mutant, lines)
        for test in self.area.kernels:
            if outcome.how or outcome.cpu_seconds > self.enough:
                break
            reach = self._reach(test)
            if reach.runs(mutant.path, lines):
                shown.append(test)
                usual = Outcome("", reach.cpu_seconds, reach.seconds)
                outcome = outcome.then(self.workshop.judge(mutant, shlex.split(test), usual))
        if self.area.kernels and not outcome.how:
            click.echo(f"shown to: {', '.join(shown) or 'no test of a kernel, for none runs that line'}", err=True)
        return outcome

    def _by_measured_reach(self, mutant: Mutant, lines: range) -> Outcome:
        """Show the mutant to the tests of the whole suite that are first to run its lines, the quickest first."""
        outcome, tests = Outcome("", 0.0, 0.0), self.whole.tests(mutant.path, lines)
        for test, seconds in tests:
            if outcome.how or outcome.cpu_seconds > self.enough:
                break
            usual = Outcome("", seconds, 2 * seconds)
            outcome = outcome.then(self.workshop.judge(mutant, [test], usual))
        if not outcome.how:
            click.echo(f"{len(tests)} tests run that line", err=True)
        return outcome

    def _reach(self, test: str) -> Reach:
        reach = self.known.get(test, self.workshop.tree, self.area.covers)
        if reach is None:
            reach = self.workshop.reach(test)
            click.echo(f"{test} takes {reach.cpu_seconds:.0f} s", err=True)
            self.known.keep(test, reach)
        return reach


def _judge_of(workshop: Workshop, area: Area, enough: float) -> Judge | None:
    try:
        judge = Judge(workshop, area, enough)
    except Red as error:
        click.echo(f"{area.name}: {error}", err=True)
        return None
    click.echo(f"{area.name}: {judge.usual.seconds:.0f} s without any mutant", err=True)
    return judge


if __name__ == "__main__":
    main()
