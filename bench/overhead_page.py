"""python -m bench.overhead_page: the page of host times, from all rows of `bench.overhead` and `bench.first_call`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import click

from .row_pages import rows_by_file, wrapped

PAGE = Path("docs/results/host-time.md")
INTRODUCTION = """
# Host time of a call

These commands measure, then write this page from all committed rows:

```
python -m bench.overhead --out FILE      # on a GPU; without one, kernels are not launched
python -m bench.first_call --out FILE
python -m bench.overhead_page
```

One query and one key unless the call says otherwise, so the GPU is never the bound. Times are medians in microseconds.
In each round the calls take turns, 200 at a time.

* `run.Forward` and `run.backward` are behind checks, choice of a backend and autograd. `plan.forward` and
  `plan.backward` are launches alone.
* The guard of the last call compares shapes, strides, dtypes and device of the tensors, as the guards of torch's
  compiled graphs do. A call that differs from the last one is found by a key.
* Decoding with one more row at each call: an executor serves all numbers of keys that are rounded alike. Each rounded
  number costs one call of about a millisecond.
* Functions are made anew at each call. Another captured number fills the trace of an earlier one if the function only
  passes it to arithmetic with tensors. Otherwise, or if the number is 0, 1, -1, 2, 0.5 or not finite, the function is
  traced.
"""
_BOUND = """
## What a C++ autograd function would bring

Forward and backward of fa4 consist of {launches:.0f} µs for launches, {rest:.0f} for allocation and Python around them,
{autograd:.0f} for torch's autograd of a Python function that only allocates, and {other:.0f} for checks and records,
{ours:.0f} µs together. torch's flash attention, whose autograd, allocation and launches are C++, takes {torch:.0f}. So
the same in C++ would bring about {gain:.2f}x. A C++ autograd function that called Python for the launches would not:
torch's own autograd with fa4's kernels beneath takes {beneath:.0f}. fa4 has no C++ autograd function: it would have to
be compiled for each version of torch.
"""


def _tables(rows: list[dict]) -> Iterator[str]:
    """Yield a table with a column for each commit."""
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    times = {(row["call"], row["commit"]): row for row in rows}
    yield "| call | " + " | ".join(f"commit {commit}" for commit in commits) + " |"
    yield "|---|" + "--:|" * len(commits)
    for call in dict.fromkeys(row["call"] for commit in reversed(commits) for row in rows if row["commit"] == commit):
        found = [times.get((call, commit)) for commit in commits]
        cells = ("" if row is None else _cell(row) for row in found)
        yield f"| {call} | " + " | ".join(cells) + " |"


def _cell(row: dict) -> str:
    median, low, high = (1000 * row[name] for name in ("median_ms", "q25_ms", "q75_ms"))
    return f"{median:.1f} ({low:.1f} to {high:.1f})"


def _bound(rows: list[dict]) -> str:
    """Return the paragraph about C++, of the last commit's rows of a GPU."""
    of = {row["call"]: 1000 * row["median_ms"] for row in rows if row["commit"] == rows[-1]["commit"]}
    launches, behind, autograd, ours, torchs, beneath = (
        of[f"{name}, forward and backward"]
        for name in (
            "plan.forward, plan.backward",
            "run.Forward, run.backward",
            "autograd of an empty operator",
            "fa4.flash_attn_func",
            "scaled_dot_product_attention (flash)",
            "scaled_dot_product_attention (fa4)",
        )
    )
    return _BOUND.strip().format(
        launches=launches, rest=behind - launches, autograd=autograd, other=ours - behind - autograd, ours=ours,
        torch=torchs, gain=ours / torchs, beneath=beneath,
    )  # fmt: skip


def _first_calls(rows: list[dict]) -> Iterator[str]:
    yield "| call | disk cache | CuTe DSL | import fa4 | first call | both | imports CuTe DSL |"
    yield "|---|---|---|--:|--:|--:|---|"
    for key in dict.fromkeys((row["problem"], row["cache"], row["compiler"]) for row in rows):
        of = [row for row in rows if (row["problem"], row["cache"], row["compiler"]) == key]
        fa4_s, first_s = (statistics.median(row[name] for row in of) for name in ("fa4_s", "first_s"))
        both = statistics.median(row["fa4_s"] + row["first_s"] for row in of)
        imports = "yes" if any(row["imports_dsl"] for row in of) else "no"
        yield f"| {' | '.join(key)} | {fa4_s:.2f} | {first_s:.2f} | {both:.2f} | {imports} |"


def page(files: dict[str, list[dict]]) -> str:
    """Return the text. files: rows by the name of their file."""
    parts = [INTRODUCTION.strip()]
    for name, rows in files.items():
        first, at = rows[0], f"Rows: `bench/results/{name}`, {rows[0]['date']}"
        if "problem" in first:
            parts += [f"## The first call of a process: {first['device']}"]
            parts.append(
                "Seconds from `import fa4` to the end of the first call, after `import torch` and the start of CUDA. "
                f"Medians of fresh processes, of which one had an empty cache. {at}, commit {first['commit']}."
            )
            parts += ["\n".join(_first_calls(rows)), "With a filled cache nothing imports CuTe DSL."]
            continue
        parts += [f"## {first['device']}", f"{first['cpu']}, torch {first['torch']}; median and quartiles. {at}."]
        parts.append("\n".join(_tables(rows)))
        if any(row["call"].startswith("scaled_dot") for row in rows):
            parts.append(_bound(rows))
    return "\n\n".join(map(wrapped, parts)) + "\n"


def files() -> dict[str, list[dict]]:
    """Return the committed rows by the name of their file."""
    return rows_by_file("*_overhead.jsonl", "*_first-call.jsonl")


@click.command(help=__doc__)
def main() -> None:
    PAGE.write_text(page(files()))


if __name__ == "__main__":
    main()
