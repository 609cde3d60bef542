"""What a timed call takes besides its kernels' work: events and launches, and an L2 full of zeros that were written.

    python -m bench.calibrate.harness --out rows.jsonl    # on a GPU; seconds

`bench.timing` writes 256 MiB of zeros before each run. They are in L2 when the run begins, and must be written to
device memory before anything else can be in their place. Here the same kernels run after these zeros, after 256 MiB
that were read, and after each other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from bench import machine
from bench.timing import L2_FLUSH_BYTES
from fa4.runtime.device import chip_of

from . import working_set
from .frame import CLOCKS, SCRATCH, Bench, Section, compile_bench

RUNS = 30
LOADS = (4, 12, 24, 56)  # of `working_set.reads`
EMPTY = Bench(
    "nothing", (Section("kernel", 1, "launch"),), "mov.u64 t, 0; @first st.global.b64 [row], t;",
    lambda: torch.zeros(SCRATCH // 4, dtype=torch.int32), lambda before, rounds: before, ctas=-1, rounds=1,
)  # fmt: skip


def benches() -> list[Bench]:
    """Kernels of one pass: nothing, and loads of a working set."""
    return [EMPTY, *(dataclasses.replace(working_set.reads(n, False), rounds=1) for n in LOADS)]


def timed(bench: Bench, before: Callable[[], object], device: torch.device, sms: int) -> dict[str, float]:
    """Median microseconds between events around a launch, and between its first CTA's start and its last CTA's end."""
    launcher, ctas = compile_bench(bench, chip_of(device), sms)
    data = torch.zeros(max(bench.nbytes(ctas), SCRATCH) // 4, dtype=torch.int32, device=device)
    times = torch.zeros(ctas, dtype=torch.int64, device=device)
    ends = torch.zeros(RUNS, ctas, CLOCKS, dtype=torch.int64, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(RUNS)]
    for i, (start, stop) in enumerate(events):
        before()
        start.record()
        launcher(times, ends[i].flatten(), data)
        stop.record()
    torch.cuda.synchronize()
    kernel = (ends[..., 3].amax(1) - ends[..., 1].amin(1)).double() / 1e3
    outside = [1e3 * start.elapsed_time(stop) for start, stop in events]
    return {"event_us": statistics.median(outside), "kernel_us": kernel.median().item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines")
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    flush = torch.zeros(L2_FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    ways: dict[str, Callable[[], object]] = {"zeros written": flush.zero_, "zeros read": flush.sum, "itself": int}
    with args.out.open("w") as file:
        file.write(json.dumps({"machine": machine.facts(device), "clocks": machine.clocks()}) + "\n")
        for bench in benches():
            for name, before in ways.items():
                times = timed(bench, before, device, sms)
                row = {"bench": bench.name, "after": name, "bytes": bench.scratch * sms, **times}
                file.write(json.dumps(row) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
