"""Predicted time of any case of a suite, from a part of each grid that a provider launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from warpcheck.findings import FINAL
from warpcheck.machine import Checks
from warpcheck.timing.chips import ChipTable
from warpcheck.timing.report import Timing

from fa4.emulator import emulate

from .providers import PROVIDERS
from .suites import BenchCase, made_tensors

SAMPLE = 12  # clusters of a grid


@dataclass(frozen=True)
class Sampled:
    """timing: of the launches of the case's direction. main: index of the launch that takes longest."""

    timing: Timing
    main: int

    @property
    def bound(self) -> str:
        return self.bounds[self.main]

    @property
    def bounds(self) -> list[str]:
        """Busiest unit of each launch."""
        busiest = (next(iter(times.shares().items())) for times in self.timing.launches)
        return [f"{name} {share:.0%}" for name, share in busiest]


def predict_sampled(
    case: BenchCase, provider: str, table: ChipTable, sample: int = SAMPLE, seed: int = 0, watts: float | None = None
) -> Sampled:
    """Run a provider's function on an emulated chip, `sample` clusters of each grid, and predict its launches.

    watts: power limit, from which the clock follows [default: the table's clock].

    Raises:
        warpcheck.errors.EmulationError: a kernel waits for a cluster that does not run.
        NotOffered: the provider has no such case.
    """
    attend = PROVIDERS[provider].build(case)
    is_backward = case.direction == "bwd"
    options = {"sms": table.sms, "timing": True, "sample": sample, "progress": 0, "on_finding": "collect"}
    with emulate(table.chip, checks=Checks(races=False, poison=False), **options) as gpu:
        q, k, v, dout = made_tensors(case, torch.device("cpu"), seed)
        if is_backward:
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            out = attend(q, k, v)
            gpu.launches.clear()
            torch.autograd.grad(out, (q, k, v), dout)
        else:
            attend(q, k, v)
    for finding in gpu.findings:
        if finding.kind in FINAL:
            raise finding.error
    clock = None if watts else table.clock_of(case.direction)
    timing = gpu.timing(table=table, clock=clock, watts=watts)
    return Sampled(timing, timing.each.index(max(timing.each)))
