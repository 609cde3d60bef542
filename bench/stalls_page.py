"""python -m bench.stalls_page: a page of docs/results, from all rows of `bench.stalls` and `bench.variants`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import click

from .row_pages import rows_by_file, wrapped

PAGE = Path("docs/results/compile-stalls.md")
INTRODUCTION = """
# Calls that wait for the compiler

Which calls wait, and how to compile ahead: [Export and ahead-of-time compilation](../export.md#random-lengths). These
commands measure, then write this page from all committed rows:

```
python -m bench.stalls --out FILE            # on any machine
python -m bench.stalls --train --out FILE    # on a GPU, or with kernels that are not launched
python -m bench.variants --out FILE          # on a GPU
python -m bench.stalls_page
```

Lengths are log-uniform, batches uniform within the tokens of a step.
"""
_PLANNED = """
Training calls of random lengths: kernels that they need, and calls that wait for one. "alone": with FA4_BACKGROUND=0.
Medians of ten seeds; "most" is the largest number of the ten. The first call always waits, for forward and backward.
"""
_TRAINED = """
Training steps. "background": empty disk cache. "filled": with the kernels of that run. "waiting": empty disk cache and
FA4_BACKGROUND=0. "wait" is the sum of all waits, also for loading from disk, and the longest one.
"""
_VARIANTS = """
What a kernel brings at random sizes that the tile table gives to it: the time of the fastest other kernel of the same
kind of layer, over its own. Geometric mean, least and largest, and the number of sizes. Names are rules of the table at
the commit of the rows. Below 1.03, compiling another kernel does not pay.
"""


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _heads(row: dict) -> str:
    head_dim, heads_q, heads_kv = row["heads"] if "heads" in row else (row["head_dim"], row["heads_q"], row["heads_kv"])
    return f"d{head_dim}, {heads_q}/{heads_kv} heads"


def _mask(row: dict) -> str:
    return "causal" if row.get("causal", True) else "full"


def _of_planned(rows: list[dict]) -> Iterator[str]:
    yield _line("layer", "kernels", "calls that wait alone", "calls that wait", "most")
    yield "|---|--:|--:|--:|--:|"
    for row in rows:
        counts = (f"{row[name]:g}" for name in ("kernels", "waits_without_background", "waits", "most"))
        yield _line(f"{_heads(row)}, {_mask(row)}", *counts)


def _of_trained(rows: list[dict]) -> Iterator[str]:
    yield _line("layer", "run", "steps", "steps that wait", "kernels", "wait, s", "longest, s", "all steps, s")
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        longest = row["longest_wait_s"] if "longest_wait_s" in row else row["longest_step_s"]
        whole = f"{row['all_steps_s']:.1f}" if "all_steps_s" in row else ""
        counts = row["steps"], row["steps_that_wait"], row["kernels"]
        yield _line(f"{_heads(row)}, causal", row["run"], *counts, f"{row['wait_s']:.1f}", f"{longest:.1f}", whole)


def _of_variants(rows: list[dict]) -> Iterator[str]:
    gains: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        if row["gain"] is not None:
            gains.setdefault((_heads(row), _mask(row), row["direction"], row["chosen"]), []).append(row["gain"])
    yield _line("layer", "mask", "direction", "kernel", "gain", "least", "largest", "sizes")
    yield "|---|---|---|---|--:|--:|--:|--:|"
    for key, values in gains.items():
        mean = math.exp(statistics.fmean(map(math.log, values)))
        yield _line(*key, f"{mean:.2f}", f"{min(values):.2f}", f"{max(values):.2f}", len(values))


def page(files: dict[str, list[dict]]) -> str:
    """Return the text. files: rows by the name of their file."""
    parts = [INTRODUCTION.strip()]
    for name, rows in files.items():
        first = rows[0]
        at = f"Rows: `bench/results/{name}`, {first['date']}, commit {first['commit']}."
        sizes = ""
        if "tokens" in first:
            sizes = "Sequences of {} to {} tokens, at most {} a step".format(*first["seqlen"], first["tokens"])
        if "gain" in first:
            parts += [f"## Kernels side by side: {first['device']}", f"{_VARIANTS.strip()} {at}"]
            parts.append("\n".join(_of_variants(rows)))
        elif "run" in first:
            parts += [f"## Training: {first['device']}", f"{_TRAINED.strip()} {sizes}, seed {first['seed']}. {at}"]
            parts.append("\n".join(_of_trained(rows)))
        else:
            parts += [f"## {first['calls']} calls on {first['chip']}, {first['how']}"]
            parts += [f"{_PLANNED.strip()} {sizes}. {at}", "\n".join(_of_planned(rows))]
    return "\n\n".join(map(wrapped, parts)) + "\n"


def files() -> dict[str, list[dict]]:
    """Return the committed rows by the name of their file."""
    return rows_by_file("*_stalls.jsonl", "*_variants.jsonl")


@click.command(help=__doc__)
def main() -> None:
    PAGE.write_text(page(files()))


if __name__ == "__main__":
    main()
