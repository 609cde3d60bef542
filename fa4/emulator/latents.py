"""Predicted time of attention over latents: absorbed MLA with 128 heads. Values are the first columns of the keys.

A tile is all heads of a query. Two lengths give the rate of a CTA, two sequences against one the cost of a tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from warpcheck.context import emulate
from warpcheck.machine import Checks
from warpcheck.machine.record import Record
from warpcheck.timing.chips import chip_table
from warpcheck.timing.grid import CtaCost, Sample, TileScheduler, makespan
from warpcheck.timing.replay import replay

from fa4.emulator.attention import PACKAGES
from fa4.emulator.predict import Prediction, steady

HEADS, _ROPE, _LATENT = 128, 64, 512
_KEYS = 1024  # of the shorter replay
_STEP = 128  # keys


@dataclass(frozen=True)
class Latents:
    """rows: queries of each sequence, whose last one sees all of its `keys`."""

    batch: int
    rows: int
    keys: int
    causal: bool

    @property
    def keys_of_rows(self) -> list[int]:
        """Keys that a query of a sequence sees, the last query first."""
        return [self.keys - i if self.causal else self.keys for i in range(self.rows)]

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * HEADS * sum(self.keys_of_rows) * (_ROPE + 2 * _LATENT)


def predict_latents(problem: Latents, package: str = "flash-attn-4", chip: str = "sm_100a") -> Prediction:
    """Predict a forward in bfloat16, with the keys in one part.

    Raises:
        ValueError: the package or chip is not predicted.
    """
    if package != "flash-attn-4" or chip != "sm_100a":
        raise ValueError(
            f"attention over latents of {package} on {chip} is not predicted, only flash-attn-4 on sm_100a"
        )
    table = chip_table(chip)
    launches = [(1, _KEYS), (1, 2 * _KEYS), (2, _KEYS)]
    times = tuple(replay(_recorded(chip, batch, keys, problem.causal), chip=table) for batch, keys in launches)
    samples = [Sample.of(found, batch) for found, (batch, _) in zip(times, launches)]
    cost = CtaCost.fitted(samples)
    a_step = samples[0].flops / (_KEYS // _STEP)
    work = [a_step * math.ceil(keys / _STEP) for keys in problem.keys_of_rows for _ in range(problem.batch)]
    slots = table.sms // math.prod(times[0].record.launch.cluster)
    computing = makespan(work, slots, cost, TileScheduler.DYNAMIC, table.numbers["replace"].value)
    read = 2 * problem.batch * problem.keys * (_ROPE + _LATENT) / table.sms / table.numbers["dram_bytes"].value
    cycles = max(computing, read)
    busy = {name: share * computing / cycles for name, share in steady(times, samples, CtaCost.fitted).items()}
    busy = dict(sorted({**busy, "dram": read / cycles}.items(), key=lambda item: -item[1]))
    clock = table.clock_of("fwd")
    return Prediction(cycles, problem.flops, clock, cost, len(work), TileScheduler.DYNAMIC, 0.0, busy, times)


@lru_cache(maxsize=16)
def _recorded(chip: str, batch: int, keys: int, causal: bool) -> Record:
    """Record one query a sequence of flash-attn-4's forward."""
    from flash_attn.cute.interface import flash_attn_func

    generator = torch.Generator().manual_seed(0)

    def normal(rows: int, heads: int, columns: int) -> Tensor:
        return torch.randn(batch, rows, heads, columns, generator=generator).to(torch.bfloat16).cuda()

    options = {"sms": 2, "checks": Checks(races=False, poison=False), **PACKAGES["flash-attn-4"].options}
    with emulate(chip, timing=True, **options) as gpu:
        q, qv = normal(1, HEADS, _ROPE), normal(1, HEADS, _LATENT)
        flash_attn_func(q, normal(keys, 1, _ROPE), normal(keys, 1, _LATENT), qv, causal=causal)
    (record,) = (launch.record for launch in gpu.launches if launch.record is not None)
    return record
