"""warpcheck timing: predicted time of the launches of a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from warpcheck.machine import Checks
from warpcheck.options import COUNT, LENGTH, NEW_FILE, check_torch
from warpcheck.timing.chips import GPUS, TABLES, ChipTable
from warpcheck.timing.report import Timing


@dataclass(frozen=True)
class Clocked:
    """What times are predicted for.

    table: of the GPU. sms: multiprocessors that the script sees [default: the GPU's]. sample: clusters of each grid
    that run; 0 for all. clock: GHz [default: the table's]. watts: power limit, from which the clock of each launch
    follows.
    """

    table: ChipTable
    sms: int | None = None
    sample: int = 0
    clock: float | None = None
    watts: float | None = None


def timed(script: Sequence[str], what: Clocked, *, timeline: bool = False) -> tuple[int, Timing | None]:
    """Run `python SCRIPT` on an emulated chip with a clock and without checks.

    Returns the script's exit code, and the predicted times; None if it launched no kernel.
    """
    from warpcheck import emulate
    from warpcheck.scripts import run_as_from_the_shell

    options: dict[str, Any] = {"sms": what.sms or what.table.sms, "sample": what.sample or None}
    checks = Checks(races=False, poison=False)
    with emulate(
        what.table.chip, checks=checks, timing=True, on_finding="collect", tells_devices_apart=True, **options
    ) as gpu:
        exit_code = run_as_from_the_shell(script)
    if not gpu.launches:
        return exit_code, None
    return exit_code, gpu.timing(timeline=timeline, table=what.table, clock=what.clock, watts=what.watts)


SAMPLE = 12


def clock_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say what times are predicted for: gpu, sample, clock, watts."""
    for option in (
        click.option("--power", "watts", type=click.FloatRange(min=1), metavar="W",
                     help="Power limit, from which the clock follows: of an H100 and an H200."),
        click.option("--clock", type=click.FloatRange(min=0.1), metavar="GHZ", help="[default: the GPU's]"),
        click.option("--sample", type=LENGTH, default=SAMPLE, show_default=True, metavar="N",
                     help="Clusters of each grid that run (CTAs, where there are none), for the time of the whole "
                     "grid; 0: all."),
        click.option("--gpu", type=click.Choice(list(GPUS)), help="[default: the chip's]"),
    ):  # fmt: skip
        command = option(command)
    return command


def clocked(
    chip: str | None, gpu: str | None, sms: int | None, sample: int, clock: float | None, watts: float | None
) -> Clocked:
    """Return what the options ask for. Raises click.UsageError for options that contradict each other."""
    if gpu is not None and chip not in (None, GPUS[gpu].chip):
        raise click.BadParameter(f"{gpu} has chip {GPUS[gpu].chip}, and --chip is {chip}", param_hint="--gpu")
    if clock is not None and watts is not None:
        raise click.UsageError("--clock and --power are both given, expected one: the clock follows from the power")
    table = GPUS[gpu] if gpu else TABLES.get(chip or "sm_100a")
    if table is None:
        raise click.BadParameter(f"the clock has no table of {chip}, only of {', '.join(TABLES)}", param_hint="--chip")
    if watts is not None and table.power is None:
        known = ", ".join(name for name, of in GPUS.items() if of.power)
        raise click.BadParameter(f"power of the {table.gpu} is unknown, expected {known}", param_hint="--power")
    return Clocked(table, sms, sample, clock, watts)


@click.command("timing", context_settings={"ignore_unknown_options": True})
@click.option("--chip", type=click.Choice(list(TABLES)), help="[default: sm_100a, or that of --gpu]")
@click.option("--sms", type=COUNT, help="Multiprocessors of the chip. [default: those of the GPU]")
@clock_options
@click.option("--timeline", type=NEW_FILE, help="Write the replays as a Chrome trace with real time.")
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- SCRIPT.py [ARGUMENTS]...")
def main(
    chip: str | None, sms: int | None, gpu: str | None, sample: int, clock: float | None, watts: float | None,
    timeline: str | None, script: tuple[str, ...],
) -> None:  # fmt: skip
    """Predict how long each launch of a script takes on a GPU: cycles, busy units, longest waits.

    The script sees all multiprocessors. Of each grid a few clusters run, and the time of the whole grid is extrapolated
    from them; `--sms 4 --sample 0` runs whole grids on four multiprocessors. Nothing is measured, and nothing is
    checked: `warpcheck run` does that. Needs torch.
    """
    check_torch()
    from warpcheck.timing import timeline as drawing

    if script[0] != "-m" and not Path(script[0]).is_file():
        raise click.BadParameter(f"there is no file {script[0]!r}", param_hint="SCRIPT")
    what = clocked(chip, gpu, sms, sample, clock, watts)
    exit_code, found = timed(script, what, timeline=timeline is not None)
    if found is None:
        click.echo("the script launched no kernel", err=True)
        raise SystemExit(exit_code or 1)
    click.echo(str(found))
    if timeline is not None:
        click.echo(f"{drawing.write(timeline, found.launches)} slices in {timeline}")
    raise SystemExit(exit_code)
