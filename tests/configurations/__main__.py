"""Compile every kernel that a call can ask for, or stand-ins for those that cannot differ: see `kernels`."""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys
import time

from fa4.device import chip_by_number

from .kernels import TARGETS
from .workers import compile_share, count


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.configurations", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--chip", help="one target, sm_90a for example; all if not given")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th kernel from the i-th on")
    parser.add_argument("--every", type=int, default=1, help="enumerate every n-th call only")
    parser.add_argument("--count", action="store_true", help="count kernels, compile none")
    options = parser.parse_args()
    targets = [(number, name) for number, name in TARGETS if options.chip in (None, chip_by_number(number).target)]
    if not targets:
        parser.error(
            f"--chip is {options.chip}, expected one of {sorted({chip_by_number(n).target for n, _ in TARGETS})}"
        )
    shard, shards = map(int, options.shard.split("/"))
    pieces = 1 if options.count else max(1, 4 * options.jobs // len(targets))
    context = multiprocessing.get_context("spawn")
    started, compiled, failed = time.perf_counter(), 0, 0
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        if options.count:
            for target, (seen, chosen) in zip(targets, pool.map(count, targets, [options.every] * len(targets))):
                print(f"sm_{target[0]} {target[1]}: {seen} kernels, {chosen} stand for them", flush=True)
            return 0
        work = {
            pool.submit(compile_share, target, options.every, shard + shards * piece, shards * pieces)
            for piece in range(pieces)
            for target in targets
        }
        for done in concurrent.futures.as_completed(work):
            for kernel, seconds, error in done.result():
                compiled, failed = compiled + 1, failed + bool(error)
                if error:
                    print(f"FAILED {kernel} ({seconds:.0f} s)\n{error}\n", flush=True)
    wall = time.perf_counter() - started
    print(f"{compiled} kernels compiled, {failed} failed, shard {options.shard}, {options.jobs} jobs, {wall:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
