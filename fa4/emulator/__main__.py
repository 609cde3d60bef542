"""python -m fa4.emulator: other people's scripts on an emulated chip."""

from __future__ import annotations

from pathlib import Path

import click

from fa4.emulator.findings import KINDS, Severity
from fa4.emulator.machine import SCHEDULES, Checks, interleavings
from fa4.emulator.options import CHIP, COUNT, NEW_FILE, choosing_checks

_SEVERITIES = click.Choice([severity.value for severity in Severity])


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """A GPU in software: run CuTe DSL kernels without a GPU, and find what a GPU would not show."""


@main.command("run", context_settings={"ignore_unknown_options": True})
@click.option("--chip", type=CHIP, default="sm_100a", show_default=True)
@click.option("--sms", type=COUNT, default=4, show_default=True, help="Multiprocessors of the chip.")
@click.option("--seed", default=0, show_default=True)
@click.option("--seeds", type=COUNT, default=3, show_default=True,
              help="In how many orders every launch is run, each with the next schedule.")  # fmt: skip
@click.option("--schedule", type=click.Choice(SCHEDULES), help="[default: one after the other]")
@choosing_checks
@click.option("--fail-on", type=_SEVERITIES, multiple=True, default=["error"], show_default=True,
              help="Severities of findings that make the exit code 1; may be repeated.")  # fmt: skip
@click.option("--json", "json_path", type=NEW_FILE, help="Write the findings as JSON.")
@click.option("--sarif", "sarif_path", type=NEW_FILE, help="Write the findings as SARIF, for code hosts.")
@click.argument("script", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- SCRIPT.py [ARGUMENTS]...")
def run(
    chip: str, sms: int, seed: int, seeds: int, schedule: str | None, checks: Checks, fail_on: tuple[str, ...],
    json_path: str | None, sarif_path: str | None, script: tuple[str, ...],
) -> None:  # fmt: skip
    """Run a script that launches CuTe DSL kernels, unmodified, as `python SCRIPT.py ARGUMENTS` would (or `-m MODULE`).

    Every launch runs in several orders from the same memory; the script sees the results of the first. The exit code is
    the script's own, or 1 where it is 0 and something was found.
    """
    from fa4.emulator.scripts import run_script

    if script[0] == "-m":
        if len(script) < 2:
            raise click.BadParameter("-m needs the name of a module", param_hint="SCRIPT")
    elif not Path(script[0]).is_file():
        raise click.BadParameter(f"there is no file {script[0]!r}", param_hint="SCRIPT")
    outcome = run_script(script, chip, interleavings(seed, seeds, schedule), sms=sms, checks=checks)
    findings = outcome.findings
    for path, text in ((json_path, findings.to_json), (sarif_path, findings.to_sarif)):
        if path is not None:
            Path(path).write_text(text() + "\n")
    click.echo()
    for finding in findings:
        click.echo(f"{finding}\n")
    for launch in outcome.launches:
        if launch.differs:
            click.echo(f"{launch.entry[:60]} leaves other bytes in {len(launch.differs)} of {seeds} orders\n")
    count = sum(launch.warp_instructions for launch in outcome.launches)
    counts = ", ".join(
        f"{len(findings.of(severity))} {severity.value}" for severity in Severity if findings.of(severity)
    )
    launches = f"{len(outcome.launches)} launch{'' if len(outcome.launches) == 1 else 'es'}"
    click.echo(
        f"{launches} on {chip}, {count:,} warp-instructions, {seeds} order{'' if seeds == 1 else 's'}: "
        + (f"found {counts}" if counts else "no finding")
    )
    if not outcome.launches:
        click.echo("the script launched no kernel", err=True)
    raise SystemExit(outcome.exit_code or int(bool(findings.of(*fail_on)) or not outcome.launches))


@main.command("kinds")
def kinds() -> None:
    """List the kinds of findings; docs/findings.md has a section for each."""
    for kind in KINDS.values():
        asked = f" (asked for by {kind.asked})" if kind.asked else ""
        click.echo(f"{kind.name:20} {kind.severity.value:10} {kind.what}, ISA {kind.isa}{asked}")


if __name__ == "__main__":
    main(prog_name="python -m fa4.emulator")
