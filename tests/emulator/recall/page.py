"""Tables of the rows of `run`: python -m tests.emulator.recall.page [ROWS.jsonl]"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.emulator.recall.corpus import FAULTS, PROBLEMS
from tests.emulator.recall.run import ROOT, Row, read

ROWS = ROOT / "bench/results/2026-11-28_emulated_recall.jsonl"
PAGE = ROOT / "docs/results/recall.md"
URLS = {
    "flash-attn-4": "https://github.com/Dao-AILab/flash-attention",
    "nvidia-cudnn-frontend": "https://github.com/NVIDIA/cudnn-frontend",
}


def found(row: Row) -> bool:
    return bool(row["errors"])


def tables(rows: list[Row]) -> str:
    """Counts, a table of each package's faults, and what is told of the packages as they are."""
    by_fault = {row["fault"]: row for row in rows if row["fault"]}
    as_it_is = {row["problem"]: row for row in rows if row["fault"] is None}
    packages = list(dict.fromkeys(problem.package for problem in PROBLEMS.values()))
    lines = ["| package | faults | found | results wrong | median seconds until found |", "|---|--:|--:|--:|--:|"]
    for package in packages:
        of = [by_fault[name] for name, fault in FAULTS.items() if fault.problem.package == package]
        seconds = sorted(row["seconds"] for row in of if found(row))
        lines.append(
            f"| {package.distribution} {package.version} | {len(of)} | {sum(map(found, of))} | "
            f"{sum(row['wrong'] for row in of)} | {seconds[len(seconds) // 2]:.0f} |"
        )
    for package in packages:
        lines += [
            "",
            f"## {package.distribution} {package.version}",
            "",
            "| fault | named in | call | told | orders | seconds | results |",
            "|---|---|---|---|--:|--:|---|",
        ]
        for name, fault in FAULTS.items():
            if fault.problem.package != package:
                continue
            row = by_fault[name]
            told = row["errors"][0] if found(row) else None
            text = f"{told['kind']}: {_short(told['told'])}" if told else "-"
            results = "wrong" if row["wrong"] else "right"
            lines.append(
                f"| {fault.what} | {_source(fault.source, package.distribution)} | {fault.problem.name} | {text} | "
                f"{row['orders']} | {row['seconds']:.0f} | {results} |"
            )
    lines += ["", "## Told of the packages as they are", "", "| call | errors |", "|---|---|"]
    for name in PROBLEMS:
        keys = dict.fromkeys(error["key"] for error in as_it_is[name]["errors"])
        listed = [f"{kind} `{place}`" for kind, place in (key.split(" ") for key in keys)]
        more = f", and {len(listed) - 5} more" if len(listed) > 5 else ""
        lines.append(f"| {name} | {', '.join(listed[:5]) + more or 'none'} |")
    return "\n".join(lines) + "\n"


def _source(source: str, distribution: str) -> str:
    if source.startswith("#"):
        return f"[{source}]({URLS[distribution]}/issues/{source[1:]})"
    if ":" not in source:
        return f"[{source}]({URLS[distribution]}/commit/{source})"
    return f"`{source.rpartition('/')[2]}`"


def _short(told: str) -> str:
    """The end of what is told says what is missing; addresses are left out."""
    for beginning in ("data race in shared memory: ", "data race in "):
        told = told.removeprefix(beginning)
    words = told.split(" ")
    return " ".join("..." if word.startswith("0x") else word for word in words)


if __name__ == "__main__":
    print(tables(read(Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS)), end="")
