"""What the commands print about findings, and the files and the exit code that follow from them."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from warpcheck.errors import Location
from warpcheck.findings import KINDS, Finding, Findings, Severity
from warpcheck.machine import LaunchReport
from warpcheck.options import NEW_FILE

_SEVERITIES = click.Choice([severity.value for severity in Severity])
_ORDER = ("--seed", "--seeds", "--schedule", "--data-seed")  # options that choose the orders and the random arrays
WORDS = "warpcheck.words"  # of the command line, in the contexts of click


@dataclass(frozen=True)
class Telling:
    """What becomes of findings: where they are written, which severities of them make the exit code 1, and whether
    those of other severities are printed one by one."""

    fail_on: tuple[str, ...]
    json_path: str | None
    sarif_path: str | None
    full: bool

    def tell(
        self, findings: Findings, launches: Sequence[LaunchReport], chip: str, seeds: int, data_seed: int | None = None
    ) -> int:
        """Write and print them; the exit code. data_seed: of random arrays, where the command fills any."""
        for path, text in ((self.json_path, findings.to_json), (self.sarif_path, findings.to_sarif)):
            if path is not None:
                Path(path).write_text(text() + "\n")
        click.echo()
        shown = Findings(f for f in findings if self.full or f.severity.value in {"error", *self.fail_on})
        shown = Findings(sorted(shown, key=lambda finding: list(Severity).index(finding.severity)))
        words, orders = click.get_current_context().meta[WORDS], set()
        for finding in shown:
            click.echo(str(finding))
            if (finding.seed, finding.schedule) not in orders:
                orders.add((finding.seed, finding.schedule))
                click.echo(f"  repeat: {repeated(words, finding, data_seed)}")
            click.echo()
        counted = [*_counted(finding for finding in findings if finding not in shown)]
        for line in counted:
            click.echo(line)
        if counted:
            click.echo("  --full prints each of them\n")
        _summary(findings, launches, chip, seeds)
        return int(bool(findings.of(*self.fail_on)))


def telling(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that say what becomes of findings; it gets them as `telling`."""

    @click.option("--fail-on", type=_SEVERITIES, multiple=True, default=["error"], show_default=True,
                  help="Severities of findings that make the exit code 1; may be repeated.")  # fmt: skip
    @click.option("--json", "json_path", type=NEW_FILE, help="Write the findings as JSON.")
    @click.option("--sarif", "sarif_path", type=NEW_FILE, help="Write the findings as SARIF, for code hosts.")
    @click.option("--full", is_flag=True, help="Print every finding; otherwise those that are no errors are counted.")
    @functools.wraps(command)
    def with_telling(*args: Any, fail_on: tuple[str, ...], json_path: str | None, sarif_path: str | None, full: bool,
                     **kwargs: Any) -> Any:  # fmt: skip
        return command(*args, telling=Telling(fail_on, json_path, sarif_path, full), **kwargs)

    return with_telling


def repeated(words: Sequence[str], finding: Finding, data_seed: int | None = None) -> str:
    """Return the command that runs the order of a finding alone. words: of the command that found it."""
    command, *rest = words
    own = rest[: rest.index("--")] if "--" in rest else rest  # a script behind -- has options of its own
    kept, skip = [], False
    for word in own:
        name, equals, _ = word.partition("=")
        if not skip and name not in _ORDER:
            kept.append(word)
        skip = not skip and name in _ORDER and not equals
    order = ["--seeds", "1", "--seed", str(finding.seed), "--schedule", finding.schedule]
    if data_seed is not None and data_seed != finding.seed:
        order += ["--data-seed", str(data_seed)]
    return shlex.join(["warpcheck", command, *order, *kept, *rest[len(own) :]])


def _counted(findings: Iterator[Finding]) -> Iterator[str]:
    """A line for each kind: how many places and times, and the first of them."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        kinds.setdefault(finding.kind, []).append(finding)
    for name, found in kinds.items():
        places, times = len(found), sum(finding.count for finding in found)
        yield (
            f"{found[0].severity.value} [{name}] {KINDS[name].what}: {places} place{'s' * (places > 1)}, "
            f"{times:,} time{'s' * (times > 1)}; first at {_short(found[0].location)}"
        )


def _short(location: Location | None) -> str:
    if location is None:
        return "the end of the launch"
    return f"ptx line {location.ptx_line}" if location.file is None else f"{location.file}:{location.line}"


def _summary(findings: Findings, launches: Sequence[LaunchReport], chip: str, seeds: int) -> None:
    for launch in launches:
        if launch.differs:
            (seed, schedule), where = launch.differs[0], launch.differences[0]
            click.echo(
                f"{launch.entry[:60]} leaves other bytes in {len(launch.differs)} of {seeds} orders; "
                f"with seed {seed}, {schedule}: {where}\n"
            )
    count = sum(launch.warp_instructions for launch in launches)
    counts = ", ".join(
        f"{len(findings.of(severity))} {severity.value}" for severity in Severity if findings.of(severity)
    )
    click.echo(
        f"{len(launches)} launch{'' if len(launches) == 1 else 'es'} on {chip}, {count:,} warp-instructions, "
        f"{seeds} order{'' if seeds == 1 else 's'}: " + (f"found {counts}" if counts else "no finding")
    )
