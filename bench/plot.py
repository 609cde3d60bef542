"""python -m bench.plot FILE: a picture of the rates in a result file, one panel for each kind of case.

Self-attention is drawn as lines, TFLOP/s over seqlen. Cases that memory traffic limits (decode) are bars in GB/s, all
other cases are bars in TFLOP/s. The forward comes first, then head_dim, heads and mask.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from .compare import read_rows
from .suites import BenchCase

_FIELDS = tuple(field.name for field in dataclasses.fields(BenchCase))
_REQUIRED = {field.name for field in dataclasses.fields(BenchCase) if field.default is dataclasses.MISSING}
_REQUIRED |= {"suite", "time"}
_INCHES = {"lines": (3.4, 2.8), "bars": (4.6, 2.9)}  # of a panel, width and height
_WIDEST = 20.0  # inches of a figure


class _Point:
    """A timed row: its case, its series, and its rate in the unit of its panel with the distances to the quartiles."""

    def __init__(self, row: dict) -> None:
        self.case = BenchCase(**{name: row[name] for name in _FIELDS if name in row})
        self.row = row
        self.series = row["provider"] + (" on an fp8 cache, half the bytes" if self.case.fp8 else "")
        if self.case.reads_memory:
            self.unit, self.rate = "GB/s", self.case.nbytes / 1e6 / row["median_ms"]
        else:
            self.unit, self.rate = "TFLOP/s", row["tflops"]  # of each GPU, where there are several
        # Quartiles of the time, as distances of the rate; predicted rows have none.
        self.below = self.rate * (1 - row["median_ms"] / row.get("q75_ms", row["median_ms"]))
        self.above = self.rate * (row["median_ms"] / row.get("q25_ms", row["median_ms"]) - 1)

    @property
    def is_square(self) -> bool:
        return not self.case.reads_memory and self.case.seqlen_q == self.case.seqlen_k

    def panel(self, lines: bool) -> tuple:
        """Points of equal keys share a panel; keys sort as panels are drawn."""
        case = self.case
        key = (case.direction != "fwd", self.unit, case.head_dim, case.head_dim_v)
        if self.is_square and not lines:
            return key
        return (*key, case.heads_q, case.heads_kv, case.causal, case.window or 0, *(() if lines else (case.seqlen_q,)))


def _length(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


def _heads(case: BenchCase) -> str:
    return str(case.heads_q) if case.heads_q == case.heads_kv else f"{case.heads_q}/{case.heads_kv}"


_ASPECTS: dict[str, Callable[[BenchCase], str]] = {
    "mask": lambda case: case.kind,
    "heads": _heads,
    "queries": lambda case: _length(case.seqlen_q),
    "batch": lambda case: f"b{case.batch}",
    "seqlen": lambda case: _length(case.seqlen_k),
    "page size": lambda case: "-" if case.page_size is None else f"p{case.page_size}",
}


def _differing(points: Iterable[_Point], names: Iterable[str]) -> list[str]:
    cases = [point.case for point in points]
    return [name for name in names if len({_ASPECTS[name](case) for case in cases}) > 1]


def _title(points: list[_Point]) -> str:
    """What all cases of a panel have in common."""
    case = points[0].case
    dims = case.head_dim if case.head_dim == case.head_dim_v else f"({case.head_dim}, {case.head_dim_v})"
    differing = _differing(points, ("mask", "heads"))
    shared = {"mask": _ASPECTS["mask"](case), "heads": f"{_heads(case)} heads"}
    if case.seqlen_q != case.seqlen_k:  # of a cache, where one query sees all keys under either mask
        queries = "1 query" if case.seqlen_q == 1 else f"{_length(case.seqlen_q)} queries"
        shared = {"heads": shared["heads"], "queries": queries}
    told = ", ".join(text for name, text in shared.items() if name not in differing)
    return f"{'forward' if case.direction == 'fwd' else 'backward'}, head_dim {dims}\n{told}".strip()


def _draw_lines(axis: Any, points: list[_Point], colors: dict[str, str]) -> dict[str, Any]:
    drawn = {}
    for name in colors:
        series = sorted((p for p in points if p.series == name), key=lambda p: p.case.seqlen_k)
        if series:
            spread = [[p.below for p in series], [p.above for p in series]]
            lengths, rates = [p.case.seqlen_k for p in series], [p.rate for p in series]
            style = {"marker": "o", "markersize": 4, "capsize": 2, "linewidth": 2.2 if name == "fa4" else 1.3}
            drawn[name] = axis.errorbar(lengths, rates, yerr=spread, color=colors[name], **style)
    ticks = sorted({p.case.seqlen_k for p in points})
    axis.set(xlabel="seqlen", xscale="log")
    axis.set_xticks(ticks, list(map(_length, ticks)), fontsize=8)
    axis.minorticks_off()
    return drawn


def _order(case: BenchCase) -> tuple:
    return case.causal, case.heads_q, case.seqlen_q, case.batch, case.seqlen_k, case.page_size or 0


def _draw_bars(axis: Any, points: list[_Point], colors: dict[str, str]) -> dict[str, Any]:
    """Groups of bars: a group is a case, its label says what differs between the cases of the panel."""
    shown = [name for name in _differing(points, _ASPECTS) if name != "queries"] or ["seqlen"]
    cases = sorted({dataclasses.replace(p.case, fp8=False) for p in points}, key=_order)
    names = [name for name in colors if any(p.series == name for p in points)]
    drawn, width = {}, 0.85 / len(names)
    for i, name in enumerate(names):
        series = [p for p in points if p.series == name]
        at = [cases.index(dataclasses.replace(p.case, fp8=False)) + (i - (len(names) - 1) / 2) * width for p in series]
        spread = [[p.below for p in series], [p.above for p in series]]
        style = {"color": colors[name], "yerr": spread, "error_kw": {"elinewidth": 0.7}}
        drawn[name] = axis.bar(at, [p.rate for p in series], width, **style)
    labels = ["\n".join(_ASPECTS[name](case) for name in shown) for case in cases]
    axis.set_xticks(range(len(cases)), labels, fontsize=7)
    beside = max(0, 3 - len(cases)) / 2  # groups that would make bars too wide
    axis.set(xlabel=", ".join(shown), xlim=(-0.6 - beside, len(cases) - 0.4 + beside))
    return drawn


def _headline(rows: list[dict], bars: bool) -> str:
    """Chip, suite, date and versions; whether times are predictions; the rates of a product and a copy in the run."""
    machine = rows[0]["machine"]
    ranks = machine.get("world", 1)
    versions = machine.get("versions", {})
    parts = [f"{f'{ranks} x ' if ranks > 1 else ''}{machine['device']}, suite {rows[0]['suite']}"]
    parts += sorted({row["time"][:10] for row in rows})
    parts += [f"{name} {versions[name]}" for name in ("torch", "flash-attn-4") if versions.get(name)]
    if any(row.get("predicted") for row in rows):
        parts.append("predicted by the emulator's clock, nothing measured")
    if rows[0].get("graph"):
        parts.append("replays of CUDA graphs")
    products = [rate for row in rows for rate in row.get("gemm_tflops", ())]
    if products:
        low, high = f"{min(products):.3g}", f"{max(products):.3g}"
        parts.append(f"matrix product {low if low == high else f'{low} to {high}'} TFLOP/s in the same run")
    if bars and "copy_gbps" in rows[0]:
        parts.append(f"copy {rows[0]['copy_gbps']:.0f} GB/s")
    if ranks > 1:
        parts.append("rates of each GPU")
    return ", ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts)


def _columns(panels: list[tuple], most: int) -> int:
    """Panels side by side: so many that lines which are not full are fewest, if each direction begins a line."""
    if len(panels) <= most:
        return len(panels)
    counts = [sum(key[0] == backward for key in panels) for backward in (False, True)]
    return min(range(most, min(most, 2) - 1, -1), key=lambda columns: sum(-count % columns for count in counts))


def _cells(panels: list[tuple], columns: int) -> list[int]:
    """The cell of each panel, counted along the lines; a backward begins a line where there are several lines."""
    forwards = sum(not key[0] for key in panels)
    skipped = -forwards % columns if len(panels) > columns else 0
    return [i + (skipped if key[0] else 0) for i, key in enumerate(panels)]


def _chosen(results: Path, pattern: str) -> list[dict]:
    """Timed rows of attention whose label matches, one for each provider and label: of several the last one.

    Raises:
        click.ClickException: there are none, or they are not of one run.
    """
    try:
        rows = [row for row in read_rows(results) if "median_ms" in row and row.keys() >= _REQUIRED]
    except click.ClickException:
        raise click.ClickException(f"{results} is not a result file of bench.run: no case that can be drawn") from None
    if any(row["suite"] == "tune" for row in rows):
        raise click.ClickException(f"{results} has rows of bench.tune: their variants differ from case to case")
    try:
        rows = [row for row in rows if re.search(pattern, row["label"])]
    except re.error as error:
        raise click.BadParameter(f"{pattern!r} is no regular expression: {error}", param_hint="--filter") from None
    if not rows:
        which = f" that matches {pattern!r}" if pattern else ""
        raise click.ClickException(f"{results} has no timed attention case{which}")
    ways = {json.dumps([row["machine"], bool(row.get("graph"))], sort_keys=True) for row in rows}
    if len(ways) > 1:
        raise click.ClickException(f"{results} has {len(ways)} machines or ways of timing: a picture shows one run")
    return list({(row["provider"], row["label"]): row for row in rows}.values())


@click.command()
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--filter", "pattern", default="", help="Only cases whose label matches this regular expression.")
@click.option("--output", type=click.Path(path_type=Path), default=None, help="Default: the file's name with .png")
def main(results: Path, pattern: str, output: Path | None) -> None:
    """Draw the timed rows of a result file; nothing is timed again."""
    rows = _chosen(results, pattern)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = list(map(_Point, rows))
    by_length: dict[tuple, set[int]] = {}
    for point in points:
        by_length.setdefault(point.panel(True), set()).add(point.case.seqlen_k)
    lines = all(p.is_square for p in points) and any(len(lengths) > 1 for lengths in by_length.values())
    panels: dict[tuple, list[_Point]] = {}
    for point in points:
        panels.setdefault(point.panel(lines), []).append(point)
    panels = dict(sorted(panels.items()))
    names = sorted({p.series for p in points}, key=lambda name: (not name.startswith("fa4"), name))
    colors = {name: f"C{i}" for i, name in enumerate(names)}
    width, height = _INCHES["lines" if lines else "bars"]
    if not lines:  # a bar is a tenth of an inch wide, a label four
        most = max(max(len(of), 4 * len({p.row["label"] for p in of})) for of in panels.values())
        width = min(max(width, 0.1 * most), _WIDEST)
    columns = _columns(list(panels), max(1, min(4, int(_WIDEST / width))))
    cells = _cells(list(panels), columns)
    count = -(-(cells[-1] + 1) // columns)
    size = (max(7.6, width * columns), height * count + 0.9)
    figure, axes = plt.subplots(count, columns, figsize=size, squeeze=False, layout="constrained")
    drawn: dict[str, Any] = {}
    for cell, of in zip(cells, panels.values()):
        axis = axes.flat[cell]
        drawn |= (_draw_lines if lines else _draw_bars)(axis, of, colors)
        axis.set(ylabel=of[0].unit, ylim=(0, 1.06 * max(p.rate + p.above for p in of)))
        axis.set_title(_title(of), fontsize=9)
        axis.grid(alpha=0.3, axis="both" if lines else "y")
    for cell in set(range(count * columns)) - set(cells):
        axes.flat[cell].set_visible(False)
    handles = [drawn[name] for name in names]
    entry = 0.55 + 0.09 * sum(map(len, names)) / len(names)  # inches of the legend
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), max(2, int(size[0] / entry))))
    bars = any(p.unit == "GB/s" for p in points)
    figure.suptitle(
        "\n".join(textwrap.wrap(_headline(rows, bars), int(size[0] * 11), break_on_hyphens=False)), fontsize=10
    )
    output = output or results.with_suffix(".png")
    values = json.dumps(sorted((p.series, p.row["label"], round(p.rate, 6)) for p in points))
    about = {"Source": results.name, "Description": pattern, "Comment": hashlib.sha256(values.encode()).hexdigest()}
    figure.savefig(output, dpi=110, metadata=about)
    plt.close(figure)
    click.echo(output)


if __name__ == "__main__":
    main()
