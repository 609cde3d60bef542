"""Rows and tables of the pairs: what each tool told of the right and of the wrong kernel.

    PYTHONPATH=warpcheck/tests python -m warpcheck_cases.pairs.table --raw RAW.jsonl > ROWS.jsonl
    PYTHONPATH=warpcheck/tests python -m warpcheck_cases.pairs.table ROWS.jsonl

The first command makes rows of those of `on_gpu`, and adds those of warpcheck; the second prints the tables.

A row has `pair`, `tool`, `right` and `wrong` (what was told, each once; null if that kernel was not run) and `seconds`
of the wrong kernel's process, or of its 30 orders. Rows of the tool "values" say whether the two kernels leave other
memory on the GPU.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from warpcheck_cases.pairs import Pair, emulated, pairs, told

Row = dict[str, Any]
SANITIZER = ("racecheck", "synccheck", "memcheck", "initcheck")
OURS, VALUES = "warpcheck", "values"
ORDERS = 30
_TOLD = re.compile(
    r"^=+ (?:(?:Error|Warning): )?(?P<what>Race reported|Potential invalid __\w+__ \w+|Deadlock detected in [\w:]+|"
    r"Barrier error detected\. [^.]+|Invalid __\w+__ \w+|Uninitialized __\w+__ memory|Illegal instruction|"
    r"Host API memory access error|Program hit (?!CUDA_ERROR_UNSUPPORTED_PTX_VERSION)\w+)"
)
_CASE = re.compile(r"^CASE (\S+) (.*)$")


def reports(output: str, ids: list[str]) -> dict[str, list[str]]:
    """Return what was told of each launch of a process.

    The line of a launch comes after its reports; those behind the last line belong to the last launch.
    """
    found: dict[str, list[str]] = {id_: [] for id_ in ids}
    pending: list[str] = []
    last = ids[0]
    for line in output.splitlines():
        if match := _CASE.match(line):
            last = match[1]
            found[last] += pending
            pending = []
        elif match := _TOLD.match(line):
            pending.append(match["what"])
    found[last] += pending
    return {id_: sorted(set(kinds)) for id_, kinds in found.items()}


def rows_of_gpu(raw: Iterable[Row]) -> Iterator[Row]:
    """Rows of compute-sanitizer's tools, and of the values alone, out of those of `on_gpu`."""
    told_of: dict[tuple[str, str, str], list[str]] = {}
    seconds: dict[tuple[str, str], float] = {}
    after: dict[tuple[str, str], str] = {}
    for row in raw:
        if row["side"] == "wrong":
            seconds[row["ids"][0], row["tool"]] = row["seconds"]
        for id_, kinds in reports(row["output"], row["ids"]).items():
            if len(row["ids"]) == 1 or f"CASE {id_} " in row["output"]:
                told_of[id_, row["tool"], row["side"]] = kinds
        if row["tool"] == "none":
            after |= {(m[1], row["side"]): m[2] for m in map(_CASE.match, row["output"].splitlines()) if m}
    for pair in pairs():
        for tool in SANITIZER:
            right, wrong = (told_of.get((pair.id, tool, side)) for side in ("right", "wrong"))
            yield {"pair": pair.id, "tool": tool, "right": right, "wrong": wrong,
                   "seconds": seconds.get((pair.id, tool))}  # fmt: skip
        digests = [after.get((pair.id, side)) for side in ("right", "wrong")]
        differs = None if None in digests else ["other memory, or an error"] * (digests[0] != digests[1])
        yield {
            "pair": pair.id,
            "tool": VALUES,
            "right": [],
            "wrong": differs,
            "seconds": seconds.get((pair.id, "none")),
        }


def rows_of_ours() -> Iterator[Row]:
    for pair in pairs():
        yield ours(pair)


def ours(pair: Pair) -> Row:
    right = told(emulated(pair, False, seeds=ORDERS))
    pair.ptx(True)  # the compilation is not counted
    started = time.monotonic()
    wrong = told(emulated(pair, True, seeds=ORDERS))
    return {
        "pair": pair.id,
        "tool": OURS,
        "right": right,
        "wrong": wrong,
        "seconds": round(time.monotonic() - started, 3),
    }


def found(row: Row) -> bool:
    """True if a tool tells the fault, and has nothing to say of the right kernel."""
    return bool(row["wrong"]) and not row["right"]


def tables(rows: list[Row]) -> str:
    by = {(row["pair"], row["tool"]): row for row in rows}
    known = [pair for pair in pairs() if (pair.id, OURS) in by]
    areas = list(dict.fromkeys(pair.area for pair in known))
    lines = ["| tool | found | missed | told of both | not run | false alarms | seconds a pair |",
             "|---|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for name, tools in _columns().items():
        judged = [_judged([by[pair.id, tool] for tool in tools]) for pair in known]
        counts = [judged.count(word) for word in ("found", "missed", "both", "")]
        alarms = sum(any(by[pair.id, tool]["right"] for tool in tools) for pair in known)
        seconds = [sum(by[pair.id, tool]["seconds"] or 0 for tool in tools) for pair in known]
        cells = [
            *counts,
            "-" if name == VALUES else f"{alarms} of {len(known)}",
            f"{sorted(seconds)[len(seconds) // 2]:.2g}",
        ]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    lines += ["", "| faults | pairs | " + " | ".join(_columns()) + " |", "|---|--:|" + "--:|" * len(_columns())]
    for area in areas:
        of = [pair for pair in known if pair.area == area]
        cells = [sum(any(found(by[p.id, tool]) for tool in tools) for p in of) for tools in _columns().values()]
        lines.append(f"| {area.replace('_', ' ')} | {len(of)} | " + " | ".join(map(str, cells)) + " |")
    lines += ["", f"| pair | fault | {OURS} | compute-sanitizer | values differ |", "|---|---|---|---|---|"]
    for pair in known:
        sanitizer = [f"{tool}: {', '.join(words)}" for tool in SANITIZER if (words := _words(by[pair.id, tool]))]
        values = by[pair.id, VALUES]["wrong"]
        differ = "not run" if values is None else "yes" if values else "no"
        lines.append(f"| {pair.id} | {pair.fault} | {', '.join(_words(by[pair.id, OURS])) or '-'} | "
                     f"{'; '.join(sanitizer) or '-'} | {differ} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def _columns() -> dict[str, tuple[str, ...]]:
    return {OURS: (OURS,), "compute-sanitizer": SANITIZER, **{tool: (tool,) for tool in (*SANITIZER, VALUES)}}


def _judged(rows: list[Row]) -> str:
    if any(map(found, rows)):
        return "found"
    if all(row["wrong"] is None for row in rows):
        return ""
    return "both" if any(row["wrong"] and row["right"] for row in rows) else "missed"


def _words(row: Row) -> list[str]:
    words = [word.removesuffix(".") for word in row["wrong"] or []]
    return [f"{word} (of the right one as well)" for word in words] if row["right"] else words


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--raw", is_flag=True, help="FILE has the rows of on_gpu: print those of the table.")
def main(file: Path, raw: bool) -> None:
    """Print the tables of FILE."""
    if raw:
        for row in [*rows_of_gpu(read(file)), *rows_of_ours()]:
            click.echo(json.dumps(row))
    else:
        click.echo(tables(read(file)), nl=False)


if __name__ == "__main__":
    main()
