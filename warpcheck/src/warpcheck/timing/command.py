"""warpcheck timing: predicted time of the launches of a script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from warpcheck.machine import Checks
from warpcheck.options import COUNT, NEW_FILE, check_torch
from warpcheck.timing.chips import TABLES
from warpcheck.timing.report import Timing


def timed(script: Sequence[str], chip: str, sms: int, *, timeline: bool = False) -> tuple[int, Timing | None]:
    """Run `python SCRIPT` on an emulated chip with a clock and without checks.

    Returns the script's exit code, and the predicted times; None if it launched no kernel.
    """
    from warpcheck import emulate
    from warpcheck.scripts import run_as_from_the_shell

    checks = Checks(races=False, poison=False)
    with emulate(chip, sms=sms, checks=checks, timing=True, on_finding="collect", tells_devices_apart=True) as gpu:
        exit_code = run_as_from_the_shell(script)
    return exit_code, gpu.timing(timeline=timeline) if gpu.launches else None


@click.command("timing", context_settings={"ignore_unknown_options": True})
@click.option("--chip", type=click.Choice(list(TABLES)), default="sm_100a", show_default=True)
@click.option("--sms", type=COUNT, default=4, show_default=True, help="Multiprocessors of the chip.")
@click.option("--timeline", type=NEW_FILE, help="Write the replays as a Chrome trace with real time.")
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- SCRIPT.py [ARGUMENTS]...")
def main(chip: str, sms: int, timeline: str | None, script: tuple[str, ...]) -> None:
    """Predict how long each launch of a script takes on a few multiprocessors: cycles, busy units, longest waits.

    Nothing is measured, and nothing is checked: `warpcheck run` does that. Needs torch.
    """
    check_torch()
    from warpcheck.timing import timeline as drawing

    if script[0] != "-m" and not Path(script[0]).is_file():
        raise click.BadParameter(f"there is no file {script[0]!r}", param_hint="SCRIPT")
    exit_code, found = timed(script, chip, sms, timeline=timeline is not None)
    if found is None:
        click.echo("the script launched no kernel", err=True)
        raise SystemExit(exit_code or 1)
    click.echo(str(found))
    if timeline is not None:
        click.echo(f"{drawing.write(timeline, found.launches)} slices in {timeline}")
    raise SystemExit(exit_code)
