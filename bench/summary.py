"""python -m bench.summary FILE: a result file as Markdown tables of TFLOP/s, and of ratios to the best and to each."""

from __future__ import annotations

import statistics
from pathlib import Path

import click

from .compare import read_rows
from .lines import headline, standing


def among_gpus(rows: list[dict]) -> list[str]:
    """Lines of a table: milliseconds of `bench.context_parallel`, and efficiency against one GPU where there is one."""
    kinds: dict[tuple, dict[str, str]] = {}
    for row in rows:
        if "median_ms" not in row:
            continue
        kind = row["direction"], row["heads_q"], row["heads_kv"], row["seqlen_q"], row["deterministic"]
        efficiency = f" ({100 * row['efficiency']:.0f}%)" if "efficiency" in row else ""
        kinds.setdefault(kind, {})[row["provider"]] = f"{row['median_ms']:.4g}{efficiency}"
    names = list(dict.fromkeys(row["provider"] for row in rows))
    lines = [f"| direction | heads | tokens | {' | '.join(names)} |", "|---" * (3 + len(names)) + "|"]
    for (direction, heads_q, heads_kv, tokens, deterministic), of in sorted(
        kinds.items(), key=lambda kind: (kind[0][0] != "fwd", *kind[0])
    ):
        order = "" if deterministic or direction == "fwd" else ", unordered"
        cells = (of.get(name, "-") for name in names)
        lines.append(f"| {direction}{order} | {heads_q}/{heads_kv} | {tokens // 1024}k | {' | '.join(cells)} |")
    return lines


@click.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("earlier", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--of", "subject", default="fa4", show_default=True, help="Provider whose ratios are told.")
@click.option(
    "--headline", "short", is_flag=True, help="A sentence each; of EARLIER runs the shapes that RESULTS lacks."
)
def main(results: Path, earlier: tuple[Path, ...], subject: str, short: bool) -> None:
    """TFLOP/s by case and provider; how the subject stands to the best of the others, by kinds of cases; then geometric
    means of its rate over each other provider's."""
    rows = read_rows(results)
    if short:
        click.echo("\n".join(headline([rows, *map(read_rows, earlier)], subject)))
        return
    if earlier:
        raise click.UsageError("EARLIER results are given without --headline")
    if any(row["suite"] == "context_parallel" for row in rows):
        click.echo("\n".join(among_gpus(rows)))
        return
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
    click.echo("\n".join(standing(rows, subject)) + "\n")
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
