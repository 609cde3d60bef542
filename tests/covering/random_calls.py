"""Random calls of every surface, as many as there is time for, each judged.

python -m tests.covering.random_calls --device cuda --count 3000 --jobs 16 --seconds 540
python -m tests.covering.random_calls --device cuda --seed 5 --only packed:12:3

Compiling takes most of the time, so that each variant, which is a row of options, is called with `--draws` sets of
lengths and data. A variant's number and the seed say all about a call.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator

import torch

from fa4.runtime.device import chip_of
from tests.covering.model import BACKENDS, CACHES, CALLS, Row
from tests.covering.run import Outcome, Where, in_processes, is_lost, run_row

Task = tuple[str, int, tuple[int, ...], int]  # surface, variant, draws, seed


def _plain(row: Row) -> bool:
    return all(row[name] == "none" for name in ("score_mod", "mask_mod")) and row["dropout"] == "no"


# What a surface's rows have.
SURFACES: dict[str, Callable[[Row], bool]] = {
    "dense": lambda row: row["form"] == "dense" and _plain(row),
    "packed": lambda row: row["form"] == "packed" and _plain(row),
    "jagged": lambda row: row["form"] == "jagged" and row["dropout"] == "no",
    "flex": lambda row: row["form"] == "flex",
    "compat": lambda row: row["form"] == "compat",
    "functions": lambda row: row["score_mod"] != "none" or (row["mask_mod"] != "none" and row["block_mask"] == "none"),
    "blocks": lambda row: row["block_mask"] != "none",
    "dropout": lambda row: row["dropout"] == "yes",
    "deterministic": lambda row: row["deterministic"] == "yes",
    "caches": lambda row: True,
}


def row_of(surface: str, variant: int, seed: int) -> Row:
    """The options of a variant; most are of 16 bits."""
    draw = random.Random(f"{seed} {surface} {variant}")
    model = CACHES if surface == "caches" else CALLS
    common = model.native(*BACKENDS)
    native = draw.random() < 0.6
    while True:
        row = {name: draw.choice(levels) for name, levels in model.factors.items()}
        if native or draw.random() < 0.9:
            row["dtype"] = draw.choice(("bfloat16", "float16"))
        if (common if native else model).allows(row) and SURFACES[surface](row):
            return row


def _do(chip: str, task: Task) -> list[Outcome]:
    """All draws of a variant, until one loses the process's context."""
    surface, variant, draws, seed = task
    row, outcomes = row_of(surface, variant, seed), list[Outcome]()
    kind = "caches" if surface == "caches" else "calls"
    for number in draws:
        data = random.Random(f"{seed} {surface} {variant} {number}").randrange(2**31)
        outcome = Outcome(f"{surface}:{variant}:{number}", data, "")
        outcomes.append(run_row(kind, row, outcome, Where(chip), is_small=chip == "torch", variant=variant))
        if outcome.status == "error" and is_lost(outcome):
            break
    return outcomes


def _lost(task: Task, status: str) -> Outcome:
    surface, variant, draws, seed = task
    return Outcome(f"{surface}:{variant}:{draws[0]}-{draws[-1]}", seed, status, row=row_of(surface, variant, seed))


def tasks(count: int, draws: int, seed: int) -> Iterator[Task]:
    """Variants of the surfaces, each of them in turn."""
    for i in range(-(-count // draws)):
        surface = list(SURFACES)[i % len(SURFACES)]
        yield surface, i // len(SURFACES), tuple(range(draws)), seed


def _only(labels: list[str], seed: int) -> Iterator[Task]:
    for label in labels:
        surface, variant, number = label.split(":")
        first, _, last = number.partition("-")
        yield surface, int(variant), tuple(range(int(first), int(last or first) + 1)), seed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.covering.random_calls", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="on a CPU, the path in plain torch")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--draws", type=int, default=15, help="sets of lengths and data for a variant")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for a variant")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all")
    parser.add_argument("--only", action="append", help="such as packed:12:3, or packed:12:0-14, with the run's seed")
    args = parser.parse_args()
    chip = "cuda" if args.device == "cuda" else "torch"
    device = torch.cuda.get_device_name() if chip == "cuda" else chip_of(torch.device("cpu"))
    print(f"{device}, seed {args.seed}", flush=True)
    begin, do = time.monotonic(), functools.partial(_do, chip)
    given = _only(args.only, args.seed) if args.only else tasks(args.count, args.draws, args.seed)
    if args.jobs == 1 and args.only:
        outcomes: Iterator[Outcome] = itertools.chain.from_iterable(map(do, given))
    else:
        outcomes = in_processes(do, _lost, given, args.jobs, args.limit, begin + args.seconds)
    counts: dict[str, collections.Counter[str]] = {name: collections.Counter() for name in SURFACES}
    backends: collections.Counter[str] = collections.Counter()
    bad: list[str] = []
    for outcome in outcomes:
        counts[outcome.label.partition(":")[0]][outcome.status] += 1
        backends[outcome.backend] += 1
        if outcome.status != "right":
            command = f"python -m tests.covering.random_calls --device {args.device} --seed {args.seed}"
            bad.append(
                f"{command} --only {outcome.label}  # {outcome.status} {outcome.text.partition(chr(10))[0][:150]}"
            )
            print(f"{outcome}\n  {outcome.text}\n  {outcome.row}\n  {bad[-1]}", flush=True)
    for name, of_surface in counts.items():
        print(f"{name:14} " + ", ".join(f"{count} {status}" for status, count in of_surface.most_common()))
    total = sum(sum(of_surface.values()) for of_surface in counts.values())
    print(f"{total} calls in {time.monotonic() - begin:.0f} s, {len(bad)} not right, seed {args.seed}")
    print("backends: " + ", ".join(f"{name or 'none'} {count}" for name, count in backends.most_common()))
    print("\n".join(bad))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
