"""python -m bench.summary FILE: a result file as a Markdown table of TFLOP/s, and ratios to one provider."""

from __future__ import annotations

import statistics
from pathlib import Path

import click

from .compare import read_rows


@click.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--of", "subject", default="fa4", show_default=True, help="Provider whose ratios are told.")
def main(results: Path, subject: str) -> None:
    """TFLOP/s by case and provider, then geometric means of the subject's rate over each other provider's."""
    rows = read_rows(results)
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    if subject not in providers:
        has = ", ".join(providers)
        raise click.BadParameter(f"{subject!r} has no rows in {results}, which has {has}", param_hint="--of")
    rates: dict[str, dict[str, float]] = {}
    for row in rows:
        rates.setdefault(row["label"], {})
        if "tflops" in row:
            rates[row["label"]][row["provider"]] = row["tflops"]
    click.echo(f"| case | {' | '.join(providers)} |")
    click.echo("|---" * (len(providers) + 1) + "|")
    for label, of in rates.items():
        cells = (f"{of[name]:.3g}" if name in of else "-" for name in providers)
        click.echo(f"| {label} | {' | '.join(cells)} |")
    click.echo()
    for name in providers:
        if name == subject:
            continue
        for direction in ("fwd", "bwd"):
            ratios = {
                label: of[subject] / of[name]
                for label, of in rates.items()
                if label.startswith(direction) and subject in of and name in of
            }
            if ratios:
                least = min(ratios, key=ratios.__getitem__)
                mean = statistics.geometric_mean(ratios.values())
                click.echo(
                    f"{direction}: {subject} / {name} = {mean:.3f} (geometric mean of {len(ratios)}); "
                    f"least {ratios[least]:.3f}, {least}"
                )


if __name__ == "__main__":
    main()
