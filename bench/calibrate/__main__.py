"""python -m bench.calibrate --out FILE: run every microbenchmark on this GPU and write its rows, about a minute.

    python -m bench.calibrate --out rows.jsonl                  # on a GPU of sm_90 or sm_100
    python -m bench.calibrate --compile 0/8                     # fill the cache with every eighth benchmark's kernel
    python -m bench.calibrate --emulate sm_90a [--only REGEX]   # check what they compute, without a GPU; no rows

The first line of the file says where it ran, each other one is a `run.Row`. The emulator's clock counts what it does
and tells no time, so nothing is written then.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import time
from pathlib import Path

import torch

from bench import machine
from fa4.runtime.device import Chip, chip_by_target, chip_of

from . import run
from .frame import compile_bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--out", type=Path, help="file of JSON lines; runs on the first GPU")
    where.add_argument("--compile", metavar="PART/PARTS", help="for the first GPU, fill the cache of kernels only")
    where.add_argument("--emulate", choices=("sm_90a", "sm_100a"), help="run on the emulated chip instead")
    parser.add_argument("--only", default="", metavar="REGEX", help="benchmarks whose names it is found in")
    parser.add_argument("--sms", type=int, default=4, help="of the emulated chip")
    args = parser.parse_args()
    if args.emulate:
        from fa4.emulator import emulate

        with emulate(args.emulate, sms=args.sms):
            chip = chip_by_target(args.emulate)
            for bench in _chosen(chip, args.only):
                run.launch_bench(bench, chip, torch.device("cpu"), args.sms)
                print(f"right: {bench.name}", flush=True)
        return
    device = torch.device("cuda", 0)
    chip, sms = chip_of(device), torch.cuda.get_device_properties(device).multi_processor_count
    if args.compile:
        part, parts = map(int, args.compile.split("/"))
        for bench in _chosen(chip, args.only)[part::parts]:
            compile_bench(bench, chip, sms)
        return
    begin = time.perf_counter()
    with args.out.open("w") as file:
        file.write(json.dumps({"machine": machine.facts(device), "sms": sms, "clocks": machine.clocks()}) + "\n")
        for bench in _chosen(chip, args.only):
            for row in run.rows(bench, run.launch_bench(bench, chip, device, sms)):
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
                print(f"{row.bench}, {row.section}: {row.median:.2f} {row.unit}", flush=True)
    print(f"{args.out}: {time.perf_counter() - begin:.0f} s")


def _chosen(chip: Chip, pattern: str) -> list[run.Bench]:
    return [bench for bench in run.offered(chip) if re.search(pattern, bench.name)]


if __name__ == "__main__":
    main()
