"""Run benchmarks on a chip or an emulated one, check what they computed, and make rows of what their clocks say."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fa4.runtime.device import Chip

from . import beside, copies, handoff, issue, launch, mixed, pairs, portable, tensor, tiles, working_set
from .frame import CLOCKS, Bench, compile_bench

BENCHES: tuple[Bench, ...] = (
    *issue.BENCHES, *handoff.BENCHES, *tensor.BENCHES, *copies.BENCHES, *pairs.BENCHES, *portable.BENCHES,
    *launch.BENCHES, *beside.BENCHES, *mixed.BENCHES, *tiles.BENCHES, *working_set.BENCHES,
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """Median and quartiles over repetitions and CTAs, in `unit`, and the SM's clock in that launch."""

    bench: str
    section: str
    unit: str
    median: float
    q25: float
    q75: float
    samples: int
    sm_mhz: float
    notes: dict[str, object]


def offered(chip: Chip) -> list[Bench]:
    """The benchmarks that are written for a chip."""
    return [bench for bench in BENCHES if not bench.chips or chip.target in bench.chips]


@dataclass(frozen=True)
class Outcome:
    """What the launches left: times (launches, CTAs, rounds, sections), ends (launches, CTAs, CLOCKS)."""

    times: torch.Tensor
    ends: torch.Tensor


def launch_bench(bench: Bench, chip: Chip, device: torch.device, sms: int) -> Outcome:
    """Compile, and launch as often as the benchmark says.

    Raises:
        AssertionError: the data are not what the benchmark must leave.
    """
    launcher, ctas = compile_bench(bench, chip, sms)
    expected = bench.initial()
    data = torch.zeros(bench.nbytes(ctas) // 4 or expected.numel(), dtype=expected.dtype, device=device)
    data[: expected.numel()] = expected.to(device)
    shape = (bench.launches, ctas, bench.rounds, len(bench.sections))
    times = torch.zeros(shape, dtype=torch.int64, device=device)
    ends = torch.zeros(bench.launches, ctas, CLOCKS, dtype=torch.int64, device=device)
    for i in range(bench.launches):
        launcher(times[i].flatten(), ends[i].flatten(), data.view(torch.int32))
        expected = bench.expected(expected, bench.rounds)
    if bench in launch.BENCHES:
        expected[1] = ctas * bench.launches  # each CTA counts itself
    left = data[: expected.numel()].cpu()
    torch.testing.assert_close(
        left, expected, rtol=0.0, atol=0.0, msg=lambda text: f"{bench.name} left wrong data: {text}"
    )  # fmt: skip
    return Outcome(times.cpu(), ends.cpu())


def rows(bench: Bench, outcome: Outcome) -> Iterator[Row]:
    """One row per section. The first repetition warms up and does not count, unless it is the only one."""
    first, first_ns, last, last_ns = outcome.ends[-1, 0].tolist()
    mhz = 1e3 * (last - first) / max(last_ns - first_ns, 1)
    if bench in launch.BENCHES:
        for name, samples in launch.nanoseconds(bench, outcome.times, outcome.ends).items():
            yield _row(bench, name, "ns", samples, mhz)
        return
    warm = outcome.times[-1, :, 1:]
    for i, section in enumerate(bench.sections):
        samples = (warm[..., i].flatten().double() / section.count).tolist()
        yield _row(bench, section.name, f"clocks a {section.unit}", samples, mhz)
        if bench.notes.get("first"):
            samples = (outcome.times[0, :, 0, i].double() / section.count).tolist()
            yield _row(bench, f"first {section.name}", f"clocks a {section.unit}", samples, mhz)


def _row(bench: Bench, section: str, unit: str, samples: list[float], mhz: float) -> Row:
    q25, median, q75 = statistics.quantiles(samples * 2, n=4, method="inclusive")  # twice: one sample is no quantile
    return Row(bench.name, section, unit, median, q25, q75, len(samples), mhz, bench.notes)
