"""python -m bench.compare A B: medians of two result files side by side; exits 1 on a regression."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table


def read_rows(path: Path) -> list[dict]:
    """The rows of a result file, in its order.

    Raises:
        click.ClickException: the file holds something else.
    """
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        if all({"provider", "label", "machine"} <= row.keys() for row in rows):
            return rows
    except (ValueError, AttributeError):
        pass
    raise click.ClickException(f"{path} is not a result file of bench.run: expected one JSON row a line")


def load(path: Path) -> dict[tuple[str, str], dict]:
    """Rows by (provider, label); a later row of the same name replaces an earlier one."""
    return {(row["provider"], row["label"]): row for row in read_rows(path)}


@click.command()
@click.argument("before", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("after", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--tolerance", default=0.05, show_default=True, help="A case slower by more than this share is a regression."
)
@click.option("--provider", default="fa4", show_default=True, help="Whose rows to compare.")
def main(before: Path, after: Path, tolerance: float, provider: str) -> None:
    """Compare the timed cases of the first file with the second's. One that is no longer timed is a regression."""
    console = Console(highlight=False)
    old, new = (
        {label: row for (name, label), row in load(path).items() if name == provider} for path in (before, after)
    )
    timed = [label for label in old if "median_ms" in old[label]]
    if not any(label in new for label in timed):
        raise click.ClickException(f"{before} and {after} share no timed case of provider {provider}")
    devices = [next(iter(rows.values()))["machine"]["device"] for rows in (old, new)]
    if devices[0] != devices[1]:
        console.print(f"the machines differ ({devices[0]}; {devices[1]}): differences say little about the code")
    table = Table("case", "before ms", "after ms", "time", "")
    regressions = 0
    for label in timed:
        row = new.get(label, {"skipped": "no row"})
        was, now = old[label]["median_ms"], row.get("median_ms")
        if now is None:
            regressions += 1
            table.add_row(label, f"{was:.3f}", row.get("error") or row.get("skipped"), "", "failed")
            continue
        slower = now / was - 1 > tolerance
        regressions += slower
        table.add_row(label, f"{was:.3f}", f"{now:.3f}", f"{now / was - 1:+.1%}", "regression" if slower else "")
    console.print(table)
    console.print(f"{len(timed)} cases, {regressions} regressions beyond {tolerance:.0%}")
    raise SystemExit(1 if regressions else 0)


if __name__ == "__main__":
    main()
