"""Cycles of our attention's kernels on a GPU, each kernel by itself, as the SMs count them.

    python -m bench.calibrate.kernels --compile 0/8        # fill the cache of kernels with every eighth case's, no GPU
    ncu --clock-control none --cache-control none -k regex:cutlass --csv --metrics METRICS \\
        python -m bench.calibrate.kernels --launch > counters.csv
    python -m bench.calibrate.kernels --read counters.csv --out rows.jsonl

METRICS is what `--metrics` prints. Nsight Compute runs one kernel at a time and reads the SMs' own counters: cycles and
time are of the same run, and nobody has to know a clock. `active` is what the comparison uses: cycles in which the SM
that has most to do holds a CTA; launching is not in it. GPCs have clocks of their own, so that `elapsed`, the most of
any SM, may be another one's.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import machine
from bench.check import what_failed
from fa4.runtime import jit
from fa4.runtime.device import chip_by_number, chip_of, emulating

from . import attention, skeletons
from .frame import CLOCKS, Bench, Section, compile_bench

METRICS = {
    "active": "sm__cycles_active.max", "active_mean": "sm__cycles_active.avg", "elapsed": "sm__cycles_elapsed.max",
    "elapsed_mean": "sm__cycles_elapsed.avg", "nanoseconds": "gpu__time_duration.sum",
}  # fmt: skip
_MARK_THREADS = 32
# Stands before each case in the profile; nothing of ours has so few threads.
_MARK = Bench(
    "nothing", (Section("SM", 1, "number"),), "mov.u64 t, 0; @first st.global.b64 [row], t;", lambda: torch.zeros(1),
    lambda before, rounds: before, threads=_MARK_THREADS, ctas=-1, rounds=1,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One kernel of a call: `number` of `kernels` in the order of their launches. Cycles are of SMs, see the module;
    active_mean and elapsed_mean are over all of them."""

    label: str
    backend: str
    direction: str
    variant: str
    number: int
    kernels: int
    kernel: str
    active: float
    active_mean: float
    elapsed: float
    elapsed_mean: float
    nanoseconds: float

    @property
    def sm_mhz(self) -> float:
        return 1e3 * self.elapsed_mean / self.nanoseconds


def launch(pattern: str, device: torch.device) -> None:
    """Launch each case after a mark, and say on standard output which ones."""
    chip, sms = chip_of(device), torch.cuda.get_device_properties(device).multi_processor_count
    mark, ctas = compile_bench(_MARK, chip, sms)
    times, ends = (torch.zeros(n * ctas, dtype=torch.int64, device=device) for n in (1, CLOCKS))
    for case in _chosen(pattern):
        with skeletons.without(case.lacks):
            try:
                work = attention.call(case, chip, attention.tensors(case, device))
            except Exception as error:  # tiles that do not fit end no run
                print(f"left out {case.label}: {what_failed(error)}", flush=True)
                continue
            if work is not None:
                print(f"case {case.label}", flush=True)
                mark(times, ends, torch.zeros(1, dtype=torch.int32, device=device))
                work()
                torch.cuda.synchronize()


def read(counters: str) -> Iterator[Row]:
    """Rows of what Nsight Compute wrote around the output of `launch`.

    Raises:
        ValueError: the launches are not those of the cases.
    """
    lines = counters.splitlines()
    labels = [line.removeprefix("case ") for line in lines if line.startswith("case ")]
    first = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    launches: dict[str, dict[str, str]] = {}
    for entry in csv.DictReader(lines[first:]):
        values = launches.setdefault(entry["ID"], {"name": entry["Kernel Name"], "block": entry["Block Size"]})
        values[entry["Metric Name"]] = entry["Metric Value"]
    parts: list[list[dict[str, str]]] = []
    for launched in launches.values():
        if launched["block"] == f"({_MARK_THREADS}, 1, 1)":
            parts.append([])
        elif parts:
            parts[-1].append(launched)
    if len(parts) != len(labels):
        raise ValueError(f"{len(parts)} marks in the profile of {len(labels)} cases")
    by_label = {case.label: case for case in attention.cases()}
    called = [by_label[label] for label in labels]
    for case, part, after in zip(called, parts, [*called[1:], None]):
        # A backward's forward comes before its mark.
        kernels = len(part) - (after is not None and after.shape.direction == "bwd")
        for number, launched in enumerate(part[:kernels]):
            numbers = {name: float(launched[metric].replace(",", "")) for name, metric in METRICS.items()}
            shape = case.shape
            name = launched["name"][:60]
            yield Row(shape.label, case.backend, shape.direction, case.variant, number, kernels, name, **numbers)


def _chosen(pattern: str) -> list[attention.Case]:
    return [case for case in attention.cases() if re.search(pattern, case.label)]


def _compile(pattern: str, part: int, parts: int) -> None:
    """Every `parts`-th case, for the cache of this machine."""
    seconds: list[float] = []
    for case in _chosen(pattern)[part::parts]:
        shape = case.shape
        d, dv = shape.head_dim, shape.head_dim_v
        queries, keys = (shape.batch, shape.seqlen_q, shape.heads_q), (shape.batch, shape.seqlen_k, shape.heads_kv)
        sizes = ((*queries, d), (*keys, d), (*keys, dv), (*queries, dv))
        empty = [torch.empty(size, dtype=torch.bfloat16) for size in sizes]
        with (
            skeletons.without(case.lacks),
            emulating(chip_by_number(90)),
            jit.compile_only(jit.cache_directory()) as compiled,
        ):
            try:
                work = attention.call(case, chip_of(torch.device("cpu")), tuple(empty))
                if work is not None:
                    work()
            except Exception as error:
                print(f"{case.label}: {what_failed(error)}", flush=True)
        seconds += compiled.seconds.values()
    print(f"part {part}: {len(seconds)} kernels in {sum(seconds):.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--launch", action="store_true", help="each case's call, under a profiler")
    what.add_argument("--read", type=Path, metavar="CSV", help="make rows of a profile")
    what.add_argument("--compile", metavar="PART/PARTS", help="fill the cache only")
    what.add_argument("--metrics", action="store_true", help="print the counters to ask for")
    parser.add_argument("--out", type=Path, help="file of JSON lines")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose labels it is found in")
    args = parser.parse_args()
    if args.metrics:
        print(",".join(METRICS.values()))
    elif args.compile:
        part, parts = map(int, args.compile.split("/"))
        _compile(args.only, part, parts)
    elif args.launch:
        launch(args.only, torch.device("cuda", 0))
    else:
        if args.out is None:
            parser.error("--read needs --out")
        rows = list(read(args.read.read_text()))
        facts = machine.facts(torch.device("cuda", 0)) if torch.cuda.is_available() else {}
        with args.out.open("w") as file:
            file.write(json.dumps({"machine": facts, "clocks": machine.clocks()}) + "\n")
            file.writelines(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
        print(f"{args.out}: {len(rows)} rows")


if __name__ == "__main__":
    main()
