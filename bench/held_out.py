"""Measured rows beside what the emulator's clock predicts from a part of each grid.

    python -m bench.held_out predict MEASURED.jsonl... --gpu H200 --power 700 --into ROWS.jsonl
    python -m bench.held_out ahead --suite drawn --gpu H200 --power 700 --into ROWS.jsonl    # before it is measured
    python -m bench.held_out join ROWS.jsonl MEASURED.jsonl
    python -m bench.held_out page ROWS.jsonl

Nothing is fitted to the rows. The clock follows from the power limit (`warpcheck.timing.chips`).
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import click
from warpcheck.timing.chips import GPUS

from .row_pages import rows_of
from .sampled import SAMPLE, predict_sampled
from .suites import SUITES, BenchCase

# Between two events around a kernel that does nothing, less the kernel: `bench.calibrate.harness` on an H200.
EVENTS_US = 3.5


def predicted(suite: str, case: BenchCase, gpu: str, watts: float, sample: int) -> dict:
    """Return a row of the predicted time of a case of fa4, as `bench.timing` takes it."""
    table = GPUS[gpu]
    found = predict_sampled(case, "fa4", table, sample, watts=watts)
    timing, main = found.timing, found.timing.wholes[found.main]
    # A launch is a part of what lies between the events.
    outside = max(0.0, EVENTS_US - table.numbers["launch"].value / timing.clock / 1000)
    return {
        "suite": suite, "label": case.label, "direction": case.direction, "gpu": gpu, "watts": watts,
        "predicted_ms": (timing.microseconds + outside) / 1000, "cycles": timing.cycles, "clock_ghz": timing.clock,
        "launches": len(timing.launches), "bound": found.bound, "clusters": main.ran if main else None,
        "of": main.clusters if main else None,
    }  # fmt: skip


def with_measured(row: dict, measured: dict) -> dict:
    return {**row, "device": measured["machine"]["device"], "measured_ms": measured["median_ms"]}


def error(row: dict) -> float:
    return float(row["predicted_ms"] / row["measured_ms"] - 1)


def page(rows: list[dict]) -> str:
    """A table, and the errors of each GPU."""
    lines = ["| GPU | row | measured, ms | predicted, ms | GHz | error |", "|---|---|--:|--:|--:|--:|"]
    lines += [
        f"| {row['gpu']} | {row['label'].removesuffix(' bfloat16')} | {row['measured_ms']:.3f} "
        f"| {row['predicted_ms']:.3f} | {row['clock_ghz']:.2f} | {error(row):+.1%} |"
        for row in rows
    ]
    told = []
    for gpu in dict.fromkeys(row["gpu"] for row in rows):
        for name, directions in (("all", ("fwd", "bwd")), ("forwards", ("fwd",)), ("backwards", ("bwd",))):
            chosen = [row for row in rows if row["gpu"] == gpu and row["direction"] in directions]
            if chosen:
                worst = max(chosen, key=lambda row: abs(error(row)))
                mean = sum(abs(error(row)) for row in chosen) / len(chosen)
                told.append(
                    f"{gpu}, {name} ({len(chosen)}): mean absolute error {mean:.1%}, mean "
                    f"{sum(map(error, chosen)) / len(chosen):+.1%}, the largest {error(worst):+.1%} "
                    f"({worst['label'].removesuffix(' bfloat16')})."
                )
    return "\n".join([*lines, "", *told]) + "\n"


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command("predict")
@click.argument("measured", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--gpu", type=click.Choice([name for name, table in GPUS.items() if table.power]), required=True)
@click.option("--power", "watts", type=float, default=700.0, show_default=True)
@click.option("--sample", type=click.IntRange(min=1), default=SAMPLE, show_default=True)
@click.option("--filter", "pattern", default="", help="Only rows whose label matches this regular expression.")
@click.option("--least", type=float, default=0.2, show_default=True,
              help="Milliseconds that a row takes at least: the host may bound shorter ones.")  # fmt: skip
@click.option("--draw", type=click.IntRange(min=1), help="Only so many of these rows, chosen by --seed.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--into", type=click.Path(path_type=Path), required=True)
def predict(measured, gpu, watts, sample, pattern, least, draw, seed, into) -> None:
    """Predict every row of fa4 that is not in --into."""
    chosen = [
        row
        for path in measured
        for row in rows_of(path)
        if row["provider"] == "fa4" and row.get("median_ms", 0.0) >= least and re.search(pattern, row["label"])
    ]
    if draw:
        chosen = random.Random(seed).sample(chosen, min(draw, len(chosen)))
    known = {(row["suite"], row["label"]) for row in rows_of(into)} if into.exists() else set()
    for row in chosen:
        if (row["suite"], row["label"]) in known:
            continue
        known.add((row["suite"], row["label"]))
        (case,) = (case for case in SUITES[row["suite"]] if case.label == row["label"])
        made = with_measured(predicted(row["suite"], case, gpu, watts, sample), row)
        click.echo(f"{made['label']}: {made['predicted_ms']:.3f} ms, measured {made['measured_ms']:.3f}")
        with into.open("a") as file:
            file.write(json.dumps(made) + "\n")


@main.command("ahead")
@click.option("--suite", type=click.Choice(sorted(SUITES)), required=True)
@click.option("--gpu", type=click.Choice([name for name, table in GPUS.items() if table.power]), required=True)
@click.option("--power", "watts", type=float, default=700.0, show_default=True)
@click.option("--sample", type=click.IntRange(min=1), default=SAMPLE, show_default=True)
@click.option("--into", type=click.Path(path_type=Path), required=True)
def _ahead(suite, gpu, watts, sample, into) -> None:
    """Predict every case of a suite that is not in --into."""
    known = {(row["suite"], row["label"]) for row in rows_of(into)} if into.exists() else set()
    for case in SUITES[suite]:
        if (suite, case.label) not in known:
            made = predicted(suite, case, gpu, watts, sample)
            click.echo(f"{made['label']}: {made['predicted_ms']:.3f} ms")
            with into.open("a") as file:
                file.write(json.dumps(made) + "\n")


@main.command("join")
@click.argument("rows", type=click.Path(exists=True, path_type=Path))
@click.argument("measured", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def _join(rows: Path, measured: tuple[Path, ...]) -> None:
    """Write the measured times of fa4 into predicted rows.

    Raises:
        click.UsageError: a predicted row was not measured.
    """
    found = {
        (row["suite"], row["label"]): row for path in measured for row in rows_of(path) if row["provider"] == "fa4"
    }
    joined = []
    for row in rows_of(rows):
        of = found.get((row["suite"], row["label"]), {})
        if "median_ms" not in of:
            raise click.UsageError(f"{row['suite']} {row['label']} was not measured")
        joined.append(with_measured(row, of))
    rows.write_text("".join(json.dumps(row) + "\n" for row in joined))


@main.command("page")
@click.argument("rows", type=click.Path(exists=True, path_type=Path))
def _page(rows: Path) -> None:
    """Print the table of predicted rows."""
    click.echo(page(rows_of(rows)), nl=False)


if __name__ == "__main__":
    main()
