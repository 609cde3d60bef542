"""python -m bench.calibrate.kernels --out FILE: cycles of our attention's kernels on this GPU, each kernel by itself.

    python -m bench.calibrate.kernels --out rows.jsonl [--only REGEX]
    python -m bench.calibrate.kernels --compile 0/8      # fill the cache of kernels with every eighth case's, no GPU
    ncu ... python -m bench.calibrate.kernels --once     # each call twice and nothing else, for a profiler

A call is repeated for a while. CUPTI says when each of its kernels began and ended; a small kernel before and after the
repetitions reads each SM's clock and the nanosecond clock, which gives the SM's clock during them, whatever power or
heat made of it. Cycles are the product. `sandwich` checks them: cycles of the SMs' own counters between the two small
kernels, divided by the repetitions, which holds the gaps between kernels too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import machine
from fa4 import jit
from fa4.device import chip_by_number, chip_of, emulating

from . import attention
from .frame import CLOCKS, Bench, Section, compile_bench

_WARM_MS, _TIMED_MS, _MOST = 25.0, 40.0, 400
# Every SM has one of its CTAs, which writes its SM, its clock and the nanoseconds, and ends.
_TICK = Bench(
    "clocks of all SMs", (Section("SM", 1, "number"),),
    "mov.u32 sm, %smid; cvt.u64.u32 t, sm; @first st.global.b64 [row], t;", lambda: torch.zeros(1),
    lambda before, rounds: before, declared=".reg .b32 sm;", threads=32, ctas=-1, smem_bytes=120 * 1024, rounds=1,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One kernel of a call: `number` of `kernels` in the order of their launches. nanoseconds: from its start to its
    end, and, where it started before its predecessor ended, from that end. sm_mhz: during the repetitions."""

    label: str
    backend: str
    direction: str
    variant: str
    number: int
    kernels: int
    kernel: str
    nanoseconds: float
    after_predecessor: float
    cycles: float
    sandwich: float
    sm_mhz: float
    repetitions: int


class Clocks:
    """Reads the clocks of all SMs, in the order of the stream."""

    def __init__(self, device: torch.device) -> None:
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._device = device
        self._launcher, _ = compile_bench(_TICK, chip_of(device), self.sms)

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors that hold, once the stream has come so far, SMs and (clock, nanoseconds, ...) of the CTAs."""
        sms = torch.zeros(self.sms, dtype=torch.int64, device=self._device)
        ends = torch.zeros(self.sms * CLOCKS, dtype=torch.int64, device=self._device)
        self._launcher(sms, ends, torch.zeros(1, dtype=torch.int32, device=self._device))
        return sms, ends


def between(first: tuple[torch.Tensor, torch.Tensor], last: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, float]:
    """Cycles and nanoseconds from one reading to another: the middle over the SMs that both met."""

    def by_sm(reading: tuple[torch.Tensor, torch.Tensor]) -> dict[int, list[int]]:
        return dict(zip(reading[0].tolist(), reading[1].reshape(-1, CLOCKS).tolist()))

    before, after = by_sm(first), by_sm(last)
    both = before.keys() & after.keys()
    cycles = statistics.median(after[sm][0] - before[sm][0] for sm in both)
    return cycles, statistics.median(after[sm][1] - before[sm][1] for sm in both)


@dataclass
class _Stretch:
    case: attention.Case
    repetitions: int
    cycles: float
    nanoseconds: float


def _repeat(work: Callable[[], object], clocks: Clocks) -> tuple[int, float, float]:
    work()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    each = max(begin.elapsed_time(end), 1e-3)
    for _ in range(min(_MOST, int(_WARM_MS / each))):
        work()
    repetitions = min(_MOST, max(4, int(_TIMED_MS / each)))
    first = clocks.read()
    for _ in range(repetitions):
        work()
    last = clocks.read()
    torch.cuda.synchronize()
    return repetitions, *between(first, last)


def measure(pattern: str, device: torch.device) -> list[Row]:
    """Rows of the cases whose labels match."""
    clocks, chip = Clocks(device), chip_of(device)
    stretches: list[_Stretch] = []
    clocks.read()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        clocks.read()  # its name tells which kernels are readings
        for case in attention.cases():
            if not re.search(pattern, case.label):
                continue
            try:
                work = attention.call(case, chip, attention.tensors(case, device))
                if work is not None:
                    stretches.append(_Stretch(case, *_repeat(work, clocks)))
            except Exception as error:  # tiles that do not fit end no run
                print(f"{case.label}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    launches = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset", "void at::"))
    )
    try:
        return list(_rows(launches, stretches))
    except (RuntimeError, IndexError) as error:
        print(f"kernels cannot be told apart, rows are of whole calls: {error}", flush=True)
        return [_whole(stretch) for stretch in stretches]


def _whole(stretch: _Stretch) -> Row:
    shape, each = stretch.case.shape, stretch.cycles / stretch.repetitions
    return Row(
        shape.label, stretch.case.backend, shape.direction, stretch.case.variant, 0, 0, "", 0.0, 0.0, each, each,
        1e3 * stretch.cycles / stretch.nanoseconds, stretch.repetitions,
    )  # fmt: skip


def _rows(launches: list[tuple[float, float, str]], stretches: list[_Stretch]) -> Any:
    """launches: start, end (microseconds) and name of every kernel of ours, by start."""
    reading = launches[0][2]
    readings = [i for i, launch in enumerate(launches) if launch[2] == reading][1:]
    if len(readings) != 2 * len(stretches):
        raise RuntimeError(f"{len(readings)} readings of clocks, expected {2 * len(stretches)}")
    least = 1e3 * statistics.median(launches[i][1] - launches[i][0] for i in readings)
    rate = statistics.median(1e3 * stretch.cycles / stretch.nanoseconds for stretch in stretches)
    yield Row(
        _TICK.name, "none", "none", "", 0, 1, reading[:120], least, least, least * rate / 1e3, 0.0, rate, len(readings)
    )  # fmt: skip
    for number, stretch in enumerate(stretches):
        inside = launches[readings[2 * number] + 1 : readings[2 * number + 1]]
        kernels = len(inside) // stretch.repetitions
        mhz, case = 1e3 * stretch.cycles / stretch.nanoseconds, stretch.case
        ends = [launch[1] for launch in inside]
        for k in range(kernels):
            own = range(k, len(inside), kernels)
            names = {inside[i][2] for i in own}
            if len(names) > 1:
                raise RuntimeError(f"{stretch.case.label}: launches are not the same each time: {names}")
            whole = 1e3 * statistics.mean(ends[i] - inside[i][0] for i in own)
            after = 1e3 * statistics.mean(ends[i] - max(inside[i][0], ends[i - 1] if i else 0) for i in own)
            yield Row(
                case.shape.label, case.backend, case.shape.direction, case.variant, k, kernels, names.pop()[:120],
                whole, after, after * mhz / 1e3, stretch.cycles / stretch.repetitions, mhz, stretch.repetitions,
            )  # fmt: skip


def _compile(pattern: str, part: int, parts: int) -> None:
    """Every `parts`-th case, for the cache of this machine."""
    directory = jit.cache_directory()
    with emulating(chip_by_number(90)), jit.compile_only(directory) as compiled:
        chip = chip_of(torch.device("cpu"))
        for case in list(attention.cases())[part::parts]:
            if not re.search(pattern, case.label):
                continue
            shape = case.shape
            d, dv = shape.head_dim, shape.head_dim_v
            queries, keys = (shape.batch, shape.seqlen_q, shape.heads_q), (shape.batch, shape.seqlen_k, shape.heads_kv)
            sizes = ((*queries, d), (*keys, d), (*keys, dv), (*queries, dv))
            try:
                work = attention.call(case, chip, tuple(torch.empty(size, dtype=torch.bfloat16) for size in sizes))
                if work is not None:
                    work()
            except Exception as error:
                print(f"{case.label}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    print(f"part {part}: {len(compiled.seconds)} kernels in {sum(compiled.seconds.values()):.0f} s")


def _once(pattern: str, device: torch.device) -> None:
    chip = chip_of(device)
    for case in attention.cases():
        if not re.search(pattern, case.label):
            continue
        work = attention.call(case, chip, attention.tensors(case, device))
        if work is not None:
            print(f"case {case.label}", flush=True)
            work()
            work()
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="file of JSON lines")
    what.add_argument("--compile", metavar="PART/PARTS", help="fill the cache only")
    what.add_argument("--once", action="store_true", help="each call twice, nothing measured")
    parser.add_argument("--only", default="", metavar="REGEX", help="cases whose labels it is found in")
    args = parser.parse_args()
    if args.compile:
        part, parts = map(int, args.compile.split("/"))
        _compile(args.only, part, parts)
        return
    device = torch.device("cuda", 0)
    if args.once:
        _once(args.only, device)
        return
    begin = time.perf_counter()
    rows = measure(args.only, device)
    with args.out.open("w") as file:
        file.write(json.dumps({"machine": machine.facts(device), "clocks": machine.clocks()}) + "\n")
        for row in rows:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
    print(f"{args.out}: {len(rows)} rows, {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
