"""How long would a forward of ours take on a whole chip? From replays of problems that a laptop emulates in seconds.

The steady state of a long sequence is that of a short one: two lengths of keys give the rate of a CTA, two tiles
against one what a tile costs besides, and the grid is handed out over all multiprocessors as the kernel hands it out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from fa4.emulator.context import emulate
from fa4.emulator.machine import Checks
from fa4.emulator.timing.chips import ChipTable, chip_table
from fa4.emulator.timing.grid import CtaCost, Handing, Sample, makespan
from fa4.emulator.timing.replay import Times, replay

_KEYS = 128  # of a block, where a diagonal cuts the work
# Query rows of a CTA's tile by chip and head dim; held against the FLOPs of what was run.
_ROWS = {("sm_100a", 64): 256, ("sm_100a", 128): 256, ("sm_90a", 128): 128}


@dataclass(frozen=True)
class Prediction:
    """cycles: of the kernel on the whole chip. flops: over the visible pairs. clock: GHz. cost: of one CTA. busy:
    unit -> share of the steady state, the busiest first. times: the replays behind it."""

    cycles: float
    flops: float
    clock: float
    cost: CtaCost
    tiles: int
    handing: Handing
    busy: dict[str, float]
    times: tuple[Times, ...]

    @property
    def milliseconds(self) -> float:
        return self.cycles / self.clock / 1e6

    @property
    def tflops(self) -> float:
        return self.flops / self.milliseconds / 1e9

    @property
    def bound(self) -> str:
        name, share = next(iter(self.busy.items()))
        return f"{name} {share:.0%}"


def predict_forward(
    chip: str, *, batch: int, seqlen: int, heads: int, head_dim: int, causal: bool, clock: float | None = None,
    timeline: bool = False,
) -> Prediction:  # fmt: skip
    """Self-attention forward of fa4 with as many key/value heads as query heads, bfloat16.

    clock: GHz [default: the chip table's]. timeline: keep what each unit did in the replays.

    Raises:
        ValueError: a chip or head dim whose tiles this does not know.
        RuntimeError: the kernel's tiles are not what this takes them for.
    """
    if causal and chip != "sm_100a":
        raise ValueError(f"causal forwards on {chip} are not predicted: the kernel changes its tiles with the length")
    if (chip, head_dim) not in _ROWS:
        raise ValueError(f"head_dim {head_dim} on {chip} is not predicted, only {', '.join(map(str, _ROWS))}")
    table = chip_table(chip)
    ctas, runs = _replays(chip, head_dim, causal, timeline)
    rows = _ROWS[chip, head_dim] * ctas
    per_block = 4 * rows * _KEYS * head_dim / ctas  # FLOPs of a tile and block of keys on each SM
    samples, replace = [], table.numbers["replace"].value
    for times, tiles, blocks in runs:
        if not math.isclose(times.flops / ctas, per_block * blocks, rel_tol=0.01):
            expected = per_block * blocks
            raise RuntimeError(f"{times.flops / ctas:.3e} FLOPs an SM where tiles of {rows} rows take {expected:.3e}")
        samples.append(Sample.of(times, tiles))
    each = len(runs[-1][0].ends) > ctas  # the run with several tiles had a CTA for each
    cost = CtaCost.of_each(samples, replace) if each else CtaCost.fitted(samples)
    of_head = [_blocks(tile, rows, seqlen, causal) for tile in reversed(range(math.ceil(seqlen / rows)))]
    work = [per_block * blocks for blocks in of_head for _ in range(batch * heads)]
    handing = Handing.EACH if each else Handing.STATIC
    cycles = makespan(work, table.sms // ctas, cost, handing, replace)
    pairs = seqlen * (seqlen + 1) / 2 if causal else seqlen * seqlen
    return Prediction(
        cycles, 4.0 * batch * heads * pairs * head_dim, clock or table.clock.value, cost, len(work), handing,
        _steady(runs[0][0], runs[1][0]), tuple(times for times, _, _ in runs),
    )  # fmt: skip


def _blocks(tile: int, rows: int, seqlen: int, causal: bool) -> int:
    return math.ceil(min(seqlen, (tile + 1) * rows if causal else seqlen) / _KEYS)


@lru_cache(maxsize=8)
def _replays(chip: str, head_dim: int, causal: bool, timeline: bool) -> tuple[int, list[tuple[Times, int, int]]]:
    """CTAs of a cluster, and launches with the tiles and blocks of keys that they ran."""
    table = chip_table(chip)
    rows = _ROWS[chip, head_dim]
    if causal:
        shapes = [(n * rows, n * rows, 1) for n in (2, 4, 6)]
        return 1, [_run(table, 1, head_dim, shape, causal, timeline) for shape in shapes]
    ctas = 2 if chip == "sm_100a" and head_dim == 128 else 1
    shapes = [(ctas * rows, 1024, 1), (ctas * rows, 2048, 1), (ctas * rows, 1024, 2)]
    return ctas, [_run(table, ctas, head_dim, shape, causal, timeline) for shape in shapes]


def _run(
    table: ChipTable, sms: int, head_dim: int, shape: tuple[int, int, int], causal: bool, timeline: bool
) -> tuple[Times, int, int]:
    import fa4

    rows, keys, heads = shape
    generator = torch.Generator().manual_seed(0)

    def normal(seqlen: int) -> torch.Tensor:
        return torch.randn(1, seqlen, heads, head_dim, generator=generator).to(torch.bfloat16)

    with emulate(table.chip, sms=sms, timing=True, checks=Checks(races=False, poison=False)) as gpu:
        fa4.flash_attn_func(normal(rows), normal(keys), normal(keys), causal=causal)
    record = gpu.launches[-1].record
    assert record is not None
    size = math.prod(record.launch.cluster)
    if size != sms:
        raise RuntimeError(f"the kernel runs in clusters of {size}, expected {sms}")
    step = _ROWS[table.chip, head_dim] * size
    tiles = rows // step * heads
    blocks = heads * sum(_blocks(tile, step, keys, causal) for tile in range(rows // step))
    return replay(record, chip=table, timeline=timeline), tiles, blocks


def _steady(short: Times, long: Times) -> dict[str, float]:
    """Shares of the time by which a longer run is longer."""
    cycles = long.cycles - short.cycles
    before, after = short.shares(), long.shares()
    found = {name: (share * long.cycles - before.get(name, 0) * short.cycles) / cycles for name, share in after.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
