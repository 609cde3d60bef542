"""Lines of a summary: for which cases of a result file how one provider stands to the best of the others."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Line(NamedTuple):
    """Cases that belong together. is_ordered: of which the deterministic backward is told."""

    name: str
    holds: Callable[[dict], bool]
    is_ordered: bool = False


def _is(row: dict, **columns) -> bool:
    return all(row[name] == value for name, value in columns.items())


def _is_square(row: dict) -> bool:
    return row["seqlen_q"] == row["seqlen_k"]


def _causal_forward(head_dim: int, seqlen: int) -> Callable[[dict], bool]:
    return lambda row: _is_square(row) and _is(row, direction="fwd", head_dim=head_dim, seqlen_q=seqlen, causal=True)


LINES = (
    Line("forward", lambda row: row["direction"] == "fwd" and _is_square(row)),
    Line("forward, d128 causal 1k", _causal_forward(128, 1024)),
    Line("forward, d64 causal 1k", _causal_forward(64, 1024)),
    Line("forward, d128 causal 512", _causal_forward(128, 512)),
    Line("decode", lambda row: row["direction"] == "fwd" and row["seqlen_q"] == 1),
    Line("backward to d128", lambda row: row["direction"] == "bwd" and row["head_dim"] <= 128),
    Line("backward, (192, 128)", lambda row: _is(row, direction="bwd", head_dim=192, head_dim_v=128)),
    Line("backward, d256", lambda row: _is(row, direction="bwd", head_dim=256)),
    Line("deterministic backward, full", lambda row: _is(row, direction="bwd", causal=False), True),
    Line("deterministic backward, causal", lambda row: _is(row, direction="bwd", causal=True), True),
)


HEADLINES = {
    "forward": LINES[0],
    "backward, head dims up to 128": next(line for line in LINES if line.name == "backward to d128"),
}


def headline(files: Iterable[Iterable[dict]], subject: str) -> list[str]:
    """A sentence for each of `HEADLINES`: mean, range, and in how many shapes the subject is slower than the fastest
    other. files: rows of runs; a shape is taken from the first run that has it."""
    cases: dict[str, dict[str, dict]] = {}
    for rows in files:
        cases = _cases(rows) | cases
    told = []
    for name, line in HEADLINES.items():
        ratios = _ratios(cases, subject, line).values()
        if ratios:
            mean, slower = statistics.geometric_mean(ratios), sum(ratio < 1 for ratio in ratios)
            told.append(
                f"{name}: geometric mean {mean:.2f}x the fastest peer over {len(ratios)} shapes ({min(ratios):.2f}x to "
                f"{max(ratios):.2f}x, slower in {slower})"
            )
    return told


def _cases(rows: Iterable[dict]) -> dict[str, dict[str, dict]]:
    """Rows that have a rate, by case and provider."""
    cases: dict[str, dict[str, dict]] = {}
    for row in rows:
        if "tflops" in row:
            cases.setdefault(row["label"], {})[row["provider"]] = row
    return cases


def _ratios(cases: dict[str, dict[str, dict]], subject: str, line: Line) -> dict[str, float]:
    found = {label: _ratio(of, subject, line) for label, of in cases.items() if subject in of}
    return {label: ratio for label, ratio in found.items() if ratio is not None}


def standing(rows: Iterable[dict], subject: str) -> list[str]:
    """A Markdown table of `LINES`: each with how many cases it holds, the mean of their ratios, and the least."""
    cases = _cases(rows)
    told = ["| | cases | geometric mean | least | of |", "|---|--:|--:|--:|---|"]
    for line in LINES:
        ratios = _ratios(cases, subject, line)
        if ratios:
            least = min(ratios, key=ratios.__getitem__)
            mean = statistics.geometric_mean(ratios.values())
            told.append(f"| {line.name} | {len(ratios)} | {mean:.3f} | {ratios[least]:.3f} | {least} |")
    return told


def _ratio(of: dict[str, dict], subject: str, line: Line) -> float | None:
    """The subject's rate over the best other's (other ways of ours are no others), or that of its deterministic
    backward over its own; None where the line does not hold the case, or a rate is missing."""
    own = of[subject]
    if not line.holds(own):
        return None
    if line.is_ordered:
        ordered = of.get(f"{subject}-deterministic")
        return None if ordered is None else ordered["tflops"] / own["tflops"]
    others = [row["tflops"] for name, row in of.items() if not name.startswith("fa4")]
    return own["tflops"] / max(others) if others else None
