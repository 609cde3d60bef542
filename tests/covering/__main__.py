"""Run rows of the arrays: all of them on a chip, or one again.

python -m tests.covering --chip sm_90a --row training:37 --seed 123
python -m tests.covering --device cuda --jobs 16 --out rows.jsonl
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import random
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.covering import stamp
from tests.covering.arrays import ARRAYS
from tests.covering.run import CHIPS, Outcome, Where, in_processes, labels, lost_task, run_task


def again(chip: str, outcome: Outcome) -> str:
    """The command that repeats a row."""
    place = "--device cuda" if chip == "cuda" else f"--chip {chip}"
    return f"python -m tests.covering {place} --row {outcome.label} --seed {outcome.seed}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.covering", description=__doc__)
    parser.add_argument("--chip", choices=("torch", *CHIPS), help="emulated, or the path in plain torch on this CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--row", action="append", help="such as training:37; all rows if none is given")
    parser.add_argument("--array", action="append", choices=ARRAYS, help="all rows of these arrays only")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a row")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all; no row begins later")
    parser.add_argument("--out", type=Path, help="a file for the outcomes, a line of JSON each")
    parser.add_argument("--stamp", action="store_true", help="note the result in tests/covering/stamp.json")
    args = parser.parse_args()
    chip = "cuda" if args.device == "cuda" else args.chip or "torch"
    where = Where(chip)
    rows = args.row or [x for x in labels(where) if args.array is None or x.partition(":")[0] in args.array]
    print(f"{chip}: {len(rows)} rows, seed {args.seed}", flush=True)
    begin = time.monotonic()
    tasks = [(label, args.seed) for label in rows]
    do = functools.partial(run_task, chip)
    if args.jobs == 1:
        outcomes = itertools.chain.from_iterable(map(do, tasks))
    else:
        outcomes = in_processes(do, lost_task, tasks, args.jobs, args.limit, begin + args.seconds)
    out = args.out.open("w") if args.out else None
    done: list[Outcome] = []
    for outcome in outcomes:
        done.append(outcome)
        if outcome.status != "right":
            print(f"{outcome}\n  {outcome.text}\n  {json.dumps(outcome.row)}\n  {again(chip, outcome)}", flush=True)
        if out:
            out.write(json.dumps(asdict(outcome)) + "\n")
            out.flush()
    counts = collections.Counter(outcome.status for outcome in done)
    backends = collections.Counter(outcome.backend for outcome in done)
    wrong = [outcome for outcome in done if outcome.status != "right"]
    summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    took = f"{len(done)} of {len(rows)} rows in {time.monotonic() - begin:.0f} s"
    print(f"{chip}, seed {args.seed}: {took}: {summary}")
    print("backends: " + ", ".join(f"{name or 'none'} {count}" for name, count in backends.most_common()))
    for outcome in wrong:
        first = outcome.text.partition("\n")[0][:120]
        print(f"  {again(chip, outcome)}  # {outcome.status} {first}")
    if args.stamp:
        stamp.write(chip, args.seed, done)
    return bool(wrong) or len(done) < len(rows)


if __name__ == "__main__":
    sys.exit(main())
