"""Our kernels' cycles on an H100 beside the emulator's clock: the part of docs/results/predicted-times.md.

    python -m bench.calibrate.compared --predict        # all cases; emulates for some 10 minutes
    python -m bench.calibrate.compared --write          # the page, from the rows

Rows are in bench/results: `MEASURED` by bench.calibrate.kernels, `PREDICTED` by this.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.run import RESULTS

from . import attention

MEASURED = RESULTS / "2026-11-22_nvidia-h100-80gb-hbm3_kernels.jsonl"
PREDICTED = RESULTS / "2026-11-22_nvidia-h100-80gb-hbm3_kernels-predicted.jsonl"
HELD_OUT = (  # measured after they were predicted
    RESULTS / "2026-11-22_nvidia-h100-80gb-hbm3_held-out.jsonl",
    RESULTS / "2026-11-22_nvidia-h100-80gb-hbm3_held-out-predicted.jsonl",
)
HELD_OUT_NEXT = (
    RESULTS / "2026-11-23_nvidia-h100-80gb-hbm3_held-out-next.jsonl",
    RESULTS / "2026-11-23_nvidia-h100-80gb-hbm3_held-out-next-predicted.jsonl",
)
KEPT = Path("build/calibrate/attention")  # what was emulated
PAGE = Path("docs/results/predicted-times.md")
BEGIN, END = "<!-- rows of bench.calibrate.compared -->\n", "<!-- end of rows -->\n"
_DIFFER = 1.03  # by which two variants must be apart to be asked for their order

Key = tuple[str, str, str]  # backend, label, variant


@dataclass(frozen=True)
class Pair:
    """Cycles of one kernel. busy: error of the mean over all SMs of the cycles in which they held a CTA."""

    key: Key
    measured: float
    predicted: float
    busy: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def _lines(path: Path) -> Iterator[dict]:
    return (json.loads(line) for line in path.read_text().splitlines()[1:])


def _key(row: dict) -> Key:
    return row["backend"], row["label"], row["variant"]


def pairs(measured: Path = MEASURED, predicted: Path = PREDICTED) -> list[Pair]:
    """Of the kernel of each call that multiplies; calls without a prediction are left out."""
    active = {
        _key(row): row
        for row in _lines(measured)
        if row["number"] == row["kernels"] // 2  # between a backward's statistics and its finish
    }
    found = {_key(row): row for row in _lines(predicted)}
    return [
        Pair(key, row["active"], found[key]["cycles"], found[key]["mean"] / row["active_mean"] - 1)
        for key, row in active.items()
        if key in found
    ]


def orders(found: list[Pair]) -> list[tuple[Pair, Pair, bool]]:
    """Pairs of variants of one problem that differ, and whether their order is right."""

    def problem(pair: Pair) -> tuple[str, str]:
        return pair.key[:2]

    return [
        (a, b, (a.measured < b.measured) == (a.predicted < b.predicted))
        for _, group in itertools.groupby(sorted(found, key=problem), problem)
        for a, b in itertools.combinations(group, 2)
        if max(a.measured, b.measured) > _DIFFER * min(a.measured, b.measured)
    ]


def text(found: list[Pair], *held_out: list[Pair]) -> str:
    """The page's part. held_out: what was measured after it was predicted, at one time and at another."""
    rows = [pair for pair in found if pair.key[2] == attention.TABLE]
    lines = [*_table(rows), "", _summary("These", rows)]
    variants = [pair for pair in found if pair.key[2] != attention.TABLE]
    if variants:
        lines.append(_summary("Other tiles of d128 full 4k", variants))
        asked = orders(found)
        right = sum(right for _, _, right in asked)
        lines.append(
            f"Of {len(asked)} pairs of tiles of one problem that differ by more than {100 * (_DIFFER - 1):.0f} %, "
            f"the order of {right} is right, {100 * right / len(asked):.0f} %."
        )
    for which, held in zip(("", ", a second time"), held_out):
        if held:
            lines += ["", f"Held out{which}:", "", *_table(held), "", _summary(f"What was held out{which}", held)]
    return "\n".join(lines) + "\n"


def _table(rows: list[Pair]) -> list[str]:
    lines = ["| kernel | measured, cycles | predicted | error | of a busy SM |", "|---|--:|--:|--:|--:|"]
    for pair in rows:
        label = pair.key[1].removesuffix(" bfloat16")
        numbers = f"{pair.measured:,.0f} | {pair.predicted:,.0f} | {100 * pair.error:+.1f} % | {100 * pair.busy:+.1f} %"
        lines.append(f"| {pair.key[0]} {label} | {numbers} |")
    return lines


def _summary(what: str, rows: list[Pair]) -> str:
    worst = max(rows, key=lambda pair: abs(pair.error))
    absolute, mean = (sum(map(of, (pair.error for pair in rows))) / len(rows) for of in (abs, float))
    busy = sum(abs(pair.busy) for pair in rows) / len(rows)
    place = f"{worst.key[0]} {worst.key[1].removesuffix(' bfloat16')}, {worst.key[2]}"
    return (
        f"{what} ({len(rows)}): mean absolute error {100 * absolute:.1f} %, mean {100 * mean:+.1f} %, "
        f"the largest {100 * worst.error:+.1f} % ({place}); of a busy SM {100 * busy:.1f} %."
    )


def on_page(page: str, part: str) -> str:
    """The page with another part."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + part + END + rest.partition(END)[2]


def _predict(pattern: str, kept: Path) -> None:
    from warpcheck.timing.chips import chip_table

    from fa4.runtime.device import chip_by_number

    from .predicted import CHIP, predict

    chip, table = chip_by_number(90), chip_table(CHIP)
    head = json.dumps({"predicted": True, "chip": CHIP, "sms": chip.sms, "numbers": table.values()})
    same = PREDICTED.exists() and PREDICTED.read_text().startswith(head + "\n")
    rows = {_key(row): row for row in (_lines(PREDICTED) if same else ())}
    for case in attention.cases():
        is_other = case.deterministic or case.lacks or case.variant in (attention.HELD_OUT, attention.HELD_OUT_NEXT)
        if is_other or case.variant.startswith(attention.ALONE) or not re.search(pattern, case.label):
            continue
        try:
            found = predict(case, chip, table, kept)
        except (RuntimeError, ValueError) as error:
            print(f"left out {case.label}: {str(error).splitlines()[0]}", flush=True)
            continue
        row = {"label": case.shape.label, "backend": case.backend, "variant": case.variant, "predicted": True}
        row |= {"cycles": round(found.cycles), "mean": round(found.mean), "busy": list(found.busy.items())[:3]}
        rows[_key(row)] = row
        print(f"{case.label}: {found.cycles:,.0f}", flush=True)
    PREDICTED.write_text("\n".join([head, *map(json.dumps, rows.values())]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="make the predicted rows")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases to predict, by label")
    parser.add_argument("--kept", type=Path, default=KEPT, help="folder of what was emulated [default: %(default)s]")
    parser.add_argument("--write", action="store_true", help="write the page's part")
    args = parser.parse_args()
    if args.predict:
        _predict(args.only, args.kept)
    part = text(pairs(), pairs(*HELD_OUT), pairs(*HELD_OUT_NEXT)) if MEASURED.exists() else ""
    if args.write:
        PAGE.write_text(on_page(PAGE.read_text(), part))
    print(part)


if __name__ == "__main__":
    main()
