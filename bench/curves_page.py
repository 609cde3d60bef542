"""python -m bench.curves_page: a page of docs/results and its pictures, from all rows of `bench.curves`.

Each file `bench/results/*_curves-*.jsonl` is a section; its picture lies beside it.
"""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .compare import load
from .curves import ATTENTION, RESULTS

PAGE = Path("docs/results/fp8-training.md")
BASE = "bfloat16"
INTRODUCTION = """
# Training loss of 8-bit attention

How to train with it, and what is rounded: [FP8 attention](../fp8.md#training). These commands measure, then write the
page and its pictures from all committed rows:

```
python -m bench.curves
python -m bench.curves_page
```

The model is a byte-level transformer, the text is Python's language reference, its last tenth held out
(`fa4/cli/demo.py`). Only attention differs between the trainings of a seed: weights start equal, batches are equal,
and the rest of the model is float32. A held-out loss is computed with the attention of its training.

* Losses are nats per byte: the mean over the seeds, and in brackets the lowest and the highest.
* Difference: the loss minus that of bfloat16 with the same seed, mean and standard error, and in brackets the lowest
  and the highest. A positive number is worse than bfloat16.
* In spreads: the mean difference divided by the standard deviation of bfloat16's loss over the seeds.
* float16 is the control. It shows how far two trainings of one seed differ if only 16-bit rounding does. A difference
  of that size is noise.
""".strip()

Runs = dict[str, dict[int, dict]]  # rows by provider and seed
Curve = Callable[[dict], list[float]]


def runs_of(file: Path) -> Runs:
    """The trainings of a file, of seeds that every provider has.

    Raises:
        click.ClickException: they differ in more than attention and seed, or no seed is complete.
    """
    rows = load(file).values()
    if len({json.dumps([row["machine"], row["settings"]]) for row in rows}) > 1:
        raise click.ClickException(f"{file} has several machines or settings: a section shows one")
    runs: Runs = {}
    for row in rows:
        runs.setdefault(row["provider"], {})[row["seed"]] = row
    complete = set.intersection(*(set(of) for of in runs.values()))
    if not complete or BASE not in runs:
        raise click.ClickException(f"{file} has no seed that was trained by every attention and {BASE}")
    return {name: {seed: of[seed] for seed in sorted(complete)} for name, of in runs.items()}


def held_out(row: dict) -> list[float]:
    return row["held_out_losses"]


def training(row: dict) -> list[float]:
    return row["training_losses"]


def differences(runs: Runs, name: str, curve: Curve) -> list[list[float]]:
    """For each point of a curve: the differences to `BASE` of equal seeds."""
    pairs = [zip(curve(row), curve(runs[BASE][seed])) for seed, row in runs[name].items()]
    return list(map(list, zip(*([x - y for x, y in pair] for pair in pairs))))


def losses(runs: Runs, name: str, curve: Curve) -> list[list[float]]:
    """For each point of a curve: the losses of the seeds."""
    return list(map(list, zip(*map(curve, runs[name].values()))))


def spread(of_seeds: list[float]) -> float:
    return statistics.stdev(of_seeds) if len(of_seeds) > 1 else float("nan")


def _range(values: list[float], form: str, error: str = "") -> str:
    return f"{statistics.mean(values):{form}}{error} ({min(values):{form}} to {max(values):{form}})"


def table(runs: Runs, curve: Curve) -> str:
    lines = ["| attention | loss | difference | in spreads |", "|---|--:|--:|--:|"]
    of_base = losses(runs, BASE, curve)[-1]
    for name in runs:
        cells = [name, _range(losses(runs, name, curve)[-1], ".4f")]
        if name == BASE:
            cells += ["-", f"spread: {spread(of_base):.4f}"]
        else:
            last = differences(runs, name, curve)[-1]
            error = f" ± {spread(last) / len(last) ** 0.5:.4f}"
            cells += [_range(last, "+.4f", error), f"{statistics.mean(last) / spread(of_base):+.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def section(file: Path, runs: Runs) -> str:
    first = next(iter(runs[BASE].values()))
    facts, of = first["machine"], first["settings"]
    of_kernel: dict[str, list[str]] = {}
    for name, of_seeds in runs.items():
        row = next(iter(of_seeds.values()))
        is_16bit = "precision" not in ATTENTION[name]
        numbers = "16-bit" if is_16bit else "e4m3" if row["multiplies_8bit"] else "dequantised"
        of_kernel.setdefault(f"`{row['backend']}` on {numbers} numbers", []).append(name)
    forwards = "; ".join(f"{kernel} ({', '.join(names)})" for kernel, names in of_kernel.items())
    software = f"torch {facts['versions']['torch']}, commit {first['commit']}, {first['time'][:10]}"
    heads = f"{of['heads_q']} query heads, {of['heads_kv']} key/value heads, head_dim {of['head_dim']}"
    model = f"{of['layers']} layers, {heads}, float32 matmul precision `{of['products']}`"
    tokens = of["batch"] * of["seqlen"]
    steps = f"{of['steps']} steps of {of['batch']} x {of['seqlen']} bytes, {len(runs[BASE])} seeds"
    trainings = f"{steps}, {of['held_out_batches'] * tokens} held-out bytes"
    return "\n\n".join([
        f"## {facts['device']}, {of['layers']} layers, {of['heads_q'] * of['head_dim']} wide",
        textwrap.fill(
            f"{software}. {model}; {trainings}. Rows: `{RESULTS}/{file.name}`.",
            width=120, break_on_hyphens=False, break_long_words=False,
        ),
        f"Forward, by backend: {forwards}.",
        "Held-out loss after the last step:", table(runs, held_out),
        f"Training loss, mean of the last {first['steps_done'][-1] - first['steps_done'][-2]} steps:",
        table(runs, training),
        f"![Held-out loss, and its difference to {BASE}](../../{RESULTS}/{file.with_suffix('.png').name})",
        f"Lines are means over the seeds, bands go from the lowest to the highest. Grey: one standard deviation of "
        f"{BASE}'s loss\nover the seeds, to both sides.",
    ])  # fmt: skip


def draw(file: Path, runs: Runs) -> None:
    """Write the picture: held-out losses, and their differences to `BASE`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    steps = next(iter(runs[BASE].values()))["steps_done"]

    def line(axis: Any, points: list[list[float]], name: str, color: str) -> None:
        axis.plot(steps, list(map(statistics.mean, points)), label=name, color=color, linewidth=1.5)
        axis.fill_between(steps, list(map(min, points)), list(map(max, points)), color=color, alpha=0.15, linewidth=0)

    of_base = list(map(spread, losses(runs, BASE, held_out)))
    right.fill_between(steps, [-x for x in of_base], of_base, color="grey", alpha=0.2, linewidth=0)
    for i, name in enumerate(runs):
        line(left, losses(runs, name, held_out), name, f"C{i}")
        if name != BASE:
            line(right, differences(runs, name, held_out), name, f"C{i}")
    left.set(xlabel="steps", ylabel="held-out loss, nats per byte", yscale="log")
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("{x:g}")
    right.set(xlabel="steps", ylabel=f"difference to {BASE}, same seed")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend()
    figure.suptitle(f"{next(iter(runs[BASE].values()))['machine']['device']}, {len(runs[BASE])} seeds", fontsize=10)
    figure.savefig(file.with_suffix(".png"), dpi=110, metadata={"Source": file.name})
    plt.close(figure)


@click.command(help=__doc__)
@click.option("--rows", "folder", default=RESULTS, type=click.Path(exists=True, path_type=Path), show_default=True)
@click.option("--page", "to_page", default=PAGE, type=click.Path(path_type=Path), show_default=True)
def main(folder: Path, to_page: Path) -> None:
    parts = [INTRODUCTION]
    for file in sorted(folder.glob("*_curves-*.jsonl")):
        runs = runs_of(file)
        draw(file, runs)
        parts.append(section(file, runs))
    to_page.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
