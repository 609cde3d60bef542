"""Time of each backward's main kernel with one CTA on the GPU, whole and without parts (`skeletons`).

    python -m bench.calibrate.kernels --compile 0/8 --only alone,     # fill the cache with every eighth case's kernels
    python -m bench.calibrate.alone --out rows.jsonl                  # on a GPU of sm_90, by torch's profiler
    python -m bench.calibrate.alone --page rows.jsonl                 # beside the predicted cycles, without a GPU

One CTA draws little power: the GPU runs at its highest clock, which a microbenchmark reads before and after.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench import machine
from bench.check import what_failed
from fa4.runtime.device import Chip, chip_by_number, chip_of

from . import attention, issue, run, skeletons
from .compared import KEPT

RUNS = 11


def cases() -> Iterator[attention.Case]:
    return (case for case in attention.cases() if case.variant.startswith(attention.ALONE))


def kernel_times(work: Callable[[], object]) -> dict[str, float]:
    """Kernel -> median nanoseconds of RUNS runs after one that does not count."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(RUNS):
            work()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name, []).append(1e3 * event.time_range.elapsed_us())
    return {name: statistics.median(times) for name, times in found.items()}


def clock_mhz(chip: Chip, device: torch.device) -> float:
    """The SM's clock in a launch of one CTA."""
    bench = next(bench for bench in issue.BENCHES if bench.name == "issue ex2")
    return next(run.rows(bench, run.launch_bench(bench, chip, device, 1))).sm_mhz


def measured(device: torch.device) -> Iterator[dict]:
    chip = chip_of(device)
    for case in cases():
        with skeletons.without(case.lacks):
            try:
                work = attention.call(case, chip, attention.tensors(case, device))
                before = clock_mhz(chip, device)
                times = kernel_times(work) if work else {}
                mhz = (before + clock_mhz(chip, device)) / 2
            except Exception as error:  # a skeleton that fails ends no run
                print(f"left out {case.label}: {what_failed(error)}", flush=True)
                continue
        name = max(times, key=times.__getitem__)
        row = {"label": case.shape.label, "backend": case.backend, "variant": case.variant, "kernel": name[:60],
               "nanoseconds": times[name], "sm_mhz": mhz, "cycles": times[name] * mhz / 1e3}  # fmt: skip
        print(f"{case.label}: {row['cycles']:,.0f} cycles at {mhz:.0f} MHz", flush=True)
        yield row


def page(rows: list[dict], kept: Path) -> str:
    """A table of the measured and the predicted cycles of the portable kernels. Hopper's main kernel waits for the one
    before it, and on a whole GPU several CTAs share the queries of a block of keys."""
    from warpcheck.timing.chips import GPUS

    from .predicted import predict

    by_key = {(row["backend"], row["label"], row["variant"]): row for row in rows}
    lines = ["| one CTA | measured, cycles | predicted | error |", "|---|--:|--:|--:|"]
    for case in cases():
        row = by_key.get((case.backend, case.shape.label, case.variant))
        if row and case.backend == "sm80":
            table = GPUS["H200"]
            cycles = predict(case, chip_by_number(90), table, kept).cycles + table.numbers["launch"].value
            lacks = case.variant.removeprefix(attention.ALONE).replace(" without nothing", ", whole")
            what = f"portable backward d{case.shape.head_dim}{lacks}"
            lines.append(f"| {what} | {row['cycles']:,.0f} | {cycles:,.0f} | {cycles / row['cycles'] - 1:+.1%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="measure, and write this file of JSON lines")
    what.add_argument("--page", type=Path, metavar="ROWS", help="print the table of these rows")
    parser.add_argument("--kept", type=Path, default=KEPT, help="folder of what was emulated [default: %(default)s]")
    args = parser.parse_args()
    if args.page:
        print(page([json.loads(line) for line in args.page.read_text().splitlines()[1:]], args.kept), end="")
        return
    device = torch.device("cuda", 0)
    with args.out.open("w") as file:
        file.write(json.dumps({"machine": machine.facts(device), "clocks": machine.clocks()}) + "\n")
        file.writelines(json.dumps(row) + "\n" for row in measured(device))


if __name__ == "__main__":
    main()
