"""python -m bench.summary FILE: a result file as Markdown tables of TFLOP/s, and of ratios to the best and to each."""

from __future__ import annotations

import statistics
from pathlib import Path

import click

from . import overlap
from .compare import read_rows
from .lines import headline, standing


def among_gpus(rows: list[dict]) -> list[str]:
    """Lines of a table: milliseconds of `bench.context_parallel`, and efficiency against one GPU where there is one."""
    kinds: dict[tuple, dict[str, str]] = {}
    for row in rows:
        if "median_ms" not in row:
            continue
        kind = row["direction"], _mask(row), row["heads_q"], row["heads_kv"], row["seqlen_q"], row["deterministic"]
        efficiency = f" ({100 * row['efficiency']:.0f}%)" if "efficiency" in row else ""
        kinds.setdefault(kind, {})[row["provider"]] = f"{row['median_ms']:.4g}{efficiency}"
    names = list(dict.fromkeys(row["provider"] for row in rows))
    has_masks = any(mask != "causal" for _, mask, *_ in kinds)
    columns = ["direction", *(["mask"] if has_masks else []), "heads", "tokens", *names]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (direction, mask, heads_q, heads_kv, tokens, deterministic), of in sorted(
        kinds.items(), key=lambda kind: (kind[0][0] != "fwd", *kind[0])
    ):
        order = "" if deterministic or direction == "fwd" else ", unordered"
        cells = [f"{direction}{order}", *([mask] if has_masks else []), f"{heads_q}/{heads_kv}", f"{tokens // 1024}k"]
        lines.append(f"| {' | '.join([*cells, *(of.get(name, '-') for name in names)])} |")
    return lines


def _mask(row: dict) -> str:
    if row.get("lengths"):
        return "packed"
    if row.get("window") is not None:
        return f"window {row['window']}"
    return "causal" if row["causal"] else "full"


def messages(rows: list[dict]) -> list[str]:
    """Lines of a table: bytes that a rank of `bench.context_parallel` sends, and the link's time for them."""
    lines = [
        "| case | provider | sent by a rank, MB | the link's time, ms | time of the call, ms |",
        "|---|---|--:|--:|--:|",
    ]
    for row in rows:
        gbps = row["machine"].get("passing_gbps")
        if "sent_bytes" in row and "median_ms" in row and gbps:
            sent = row["sent_bytes"] / 1e6
            cells = f"{sent:.0f} | {sent / gbps:.3g} | {row['median_ms']:.4g}"
            lines.append(f"| {row['label']} | {row['provider']} | {cells} |")
    return lines if len(lines) > 2 else []


def efficiencies(rows: list[dict]) -> list[str]:
    """Lines of a table: best, geometric mean and worst efficiency of each provider by length."""
    lines = ["| provider | tokens | cases | geometric mean | worst | best |", "|---|---|--:|--:|--:|--:|"]
    kinds: dict[tuple, list[float]] = {}
    for row in rows:
        if "efficiency" in row:
            tokens = "64k and more" if row["seqlen_q"] >= 65536 else "fewer"
            kinds.setdefault((row["provider"], tokens), []).append(row["efficiency"])
    for (name, tokens), found in kinds.items():
        of = (f"{100 * x:.0f}%" for x in (statistics.geometric_mean(found), min(found), max(found)))
        lines.append(f"| {name} | {tokens} | {len(found)} | {' | '.join(of)} |")
    return lines if len(lines) > 2 else []


def training_lines(rows: list[dict]) -> list[str]:
    """Lines of a table of `bench.progress`; of messages, ms of one step."""
    columns = ["split by", "provider", "steps", "ms a step", "quartiles", "repeats bitwise"]
    columns += ["messages", "under attention", "exposed"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        of = row.get("overlap", {})
        cells = [row["mode"], row["provider"], str(row["steps"]), f"{row['median_ms']:.2f}"]
        cells += [f"{row['q25_ms']:.2f} to {row['q75_ms']:.2f}", "yes" if row["repeats_bitwise"] else "no"]
        cells += [f"{of[name]:.2f}" if name in of else "-" for name in ("messages", "under_attention", "exposed")]
        lines.append(f"| {' | '.join(cells)} |")
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
    if any(row["suite"] == "progress" for row in rows):
        click.echo("\n".join(training_lines(rows)))
        return
    if any(row["suite"] == "context_parallel" for row in rows):
        tables = among_gpus(rows), efficiencies(rows), messages(rows), overlap.table(rows)
        click.echo("\n\n".join("\n".join(lines) for lines in tables if lines))
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
