"""What the emulator's clock says of the microbenchmarks: their sections' clocks, as a replay gives them.

    python -m bench.calibrate.replayed --rows h100.jsonl [--only REGEX] [--set wgmma_tail=60 ...]

prints them beside those that were measured. Numbers of a chip's table are chosen by this, and by nothing else.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import statistics
from pathlib import Path

import numpy as np
import torch
from warpcheck.machine import Checks
from warpcheck.timing.chips import GPUS, ChipTable
from warpcheck.timing.code import binary_of, issue_with
from warpcheck.timing.replay import replay

from fa4.emulator import emulate
from fa4.runtime.device import chip_by_number

from . import beside, launch, run
from .frame import Bench

CHIP = "sm_90a"
KEPT = Path("build/calibrate")  # records, by benchmark


def record_of(bench: Bench, folder: Path) -> tuple:
    """The record of a launch on few SMs, and its machine code."""
    path = folder / (re.sub(r"\W+", "-", bench.name) + ".pickle")
    if path.exists():
        return pickle.loads(path.read_bytes())
    sms = max(1, bench.cluster)
    with emulate(CHIP, sms=sms, timing=True, checks=Checks(races=False, poison=False)) as gpu:
        run.launch_bench(bench, chip_by_number(90), torch.device("cpu"), sms)
    record = gpu.launches[-1].record
    assert record is not None
    found = (record, binary_of(record))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(found))
    return found


def sections(bench: Bench, table: ChipTable, folder: Path) -> dict[str, float]:
    """Section -> clocks a unit, the median of the repetitions after the first."""
    record, binary = record_of(bench, folder)
    ranges = ((0, 1 << 62, bench.notes["sharers"], bench.notes["cold"]),) if "sharers" in bench.notes else ()
    clocks = replay(record, issue_with(record, binary), table, ranges=ranges).clocks
    own = [clocks[(clocks[:, 0] == 0) & (clocks[:, 1] == warp), 2] for warp in (0, 4)]
    if "beside" in bench.name:
        # All warps read where a phase starts; where it stops those that are timed: in four phases each of the two warps
        # twice, in three the first in the first, the second in the second, and both in the last.
        readings, *pairs = (6, 0, 3, 1, 4) if bench in beside.BENCHES else (5, 0, 3, 1, 3)
        first, second = (_readings(warp, bench.rounds, readings) for warp in own)
        starts = [(first, pairs[0]), (second, pairs[2]), (first, pairs[1]), (second, pairs[3])]
        found = [clock[:, at + 1] - clock[:, at] for clock, at in starts]
    else:
        readings = _readings(own[0], bench.rounds, 2 * len(bench.sections))
        found = list((readings[:, 1::2] - readings[:, ::2]).T)
    return {
        section.name: statistics.median(clock[1:].tolist()) / section.count
        for section, clock in zip(bench.sections, found)
    }


def _readings(clocks: np.ndarray, rounds: int, count: int) -> np.ndarray:
    """(rounds, count) readings. One comes after the last of them, and at most one before the first."""
    return clocks[-1 - rounds * count : -1].reshape(rounds, count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="what bench.calibrate wrote")
    parser.add_argument("--only", default="", metavar="REGEX", help="benchmarks whose names it is found in")
    parser.add_argument("--gpu", choices=("H100", "H200"), default="H100", help="whose table [default: %(default)s]")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another number of the table")
    parser.add_argument("--kept", type=Path, default=KEPT, help="folder of records [default: %(default)s]")
    args = parser.parse_args()
    values = dict(one.split("=") for one in args.set)
    table = GPUS[args.gpu].but(**{name: float(value) for name, value in values.items()})
    measured = {}
    for line in args.rows.read_text().splitlines()[1:] if args.rows else ():
        row = json.loads(line)
        measured[row["bench"], row["section"]] = row
    for bench in run.offered(chip_by_number(90)):
        if bench in launch.BENCHES or not re.search(args.only, bench.name):
            continue
        for name, clocks in sections(bench, table, args.kept).items():
            row = measured.get((bench.name, name))
            beside = f"{row['median']:9.1f} measured, {100 * (clocks / row['median'] - 1):+6.1f} %" if row else ""
            print(f"{bench.name}, {name}: {clocks:9.1f} {beside}", flush=True)


if __name__ == "__main__":
    main()
