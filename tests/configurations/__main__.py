"""Compile every kernel that a call can ask for, or stand-ins for those that cannot differ: see `kernels`."""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import multiprocessing
import random
import sys
import time

from fa4.runtime.device import chip_by_number

from .kernels import TARGETS
from .workers import compile_share, enumerate_target


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.configurations", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--chip", help="one target, sm_90a for example; all if not given")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th kernel from the i-th on")
    parser.add_argument("--every", type=int, default=1, help="enumerate every n-th call only")
    parser.add_argument("--start", type=int, default=0, help="leave out so many of the shard's kernels")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--count", action="store_true", help="count kernels, compile none")
    options = parser.parse_args()
    targets = [(number, name) for number, name in TARGETS if options.chip in (None, chip_by_number(number).target)]
    if not targets:
        parser.error(
            f"--chip is {options.chip}, expected one of {sorted({chip_by_number(n).target for n, _ in TARGETS})}"
        )
    shard, shards = map(int, options.shard.split("/"))
    context = multiprocessing.get_context("spawn")
    started, compiled, failed, seen, chosen = time.perf_counter(), 0, 0, 0, []
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        every = [options.every] * len(targets)
        for target, (asked, kernels) in zip(targets, pool.map(enumerate_target, targets, every)):
            print(f"sm_{target[0]} {target[1]}: {asked} kernels, {len(kernels)} stand for them", flush=True)
            seen, chosen = seen + asked, chosen + kernels[shard::shards]
        if options.count:
            return 0
        print(f"{len(chosen)} kernels to compile after {time.perf_counter() - started:.0f} s", flush=True)
        random.Random(0).shuffle(chosen)  # so that processes get as much work as each other
        del chosen[: options.start]
        work = [pool.submit(compile_share, chosen[at : at + 4]) for at in range(0, len(chosen), 4)]
        for done in work:
            left = options.seconds - (time.perf_counter() - started)
            if not concurrent.futures.wait([done], None if math.isinf(left) else max(left, 0)).done:
                print(f"time is up; go on with --start {options.start + compiled}", flush=True)
                pool.shutdown(wait=False, cancel_futures=True)
                break
            for kernel, seconds, error in done.result():
                compiled, failed = compiled + 1, failed + bool(error)
                if error:
                    print(f"FAILED {kernel} ({seconds:.0f} s)\n{error}\n", flush=True)
    wall = time.perf_counter() - started
    print(
        f"{compiled} of {len(chosen)} kernels compiled, {failed} failed; they stand for {seen}; "
        f"shard {options.shard}, {options.jobs} jobs, {wall:.0f} s"
    )
    return int(failed > 0 or compiled < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
