"""What the emulator's clock says of the kernels that `bench.calibrate.kernels` measures on an H100.

A problem of the field is too large to emulate. Three launches on one SM with the same tiles give what a CTA takes: one
work tile with few blocks, one with more, and two one after the other. Tiles are then handed out to all SMs as the
kernel does it. What was recorded is kept on disk, so that another table of the chip only replays it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from warpcheck.machine import Checks
from warpcheck.machine.record import Record
from warpcheck.timing.chips import ChipTable
from warpcheck.timing.code import binary_of, issue_of, issue_with
from warpcheck.timing.grid import CtaCost, Sample
from warpcheck.timing.issue import Issue
from warpcheck.timing.replay import replay, resident_ctas

from bench.suites import BenchCase
from fa4.emulator import emulate
from fa4.emulator.tile_schedule import TileSchedule, tile_schedule_of
from fa4.runtime.device import Chip, chip_of
from fa4.runtime.spec import ProblemSize, Saved
from fa4.torch_ops import run

from . import attention, skeletons

CHIP = "sm_90a"
_LEAST = 640  # rows or keys of the shorter of two runs through one tile


@dataclass(frozen=True)
class Recorded:
    """One launch on one SM: what it did, its machine code, what its warps issue, and tiles that a place (a CTA's, of
    those that an SM has at a time) went through. inputs: addresses from and to, and whether one CTA alone
    reads them."""

    record: Record
    binary: bytes
    issue: Issue
    tiles: int
    inputs: tuple[tuple[int, int, bool], ...]


def shapes_of(case: attention.Case, walk: TileSchedule) -> list[tuple[BenchCase, int]]:
    """Problems to run on one SM, and the tiles of a place in each."""
    shape, few = case.shape, walk.step * max(4, math.ceil(_LEAST / walk.step))

    def problem(rows: int, others: int, tiles: int = 1) -> BenchCase:
        heads = tiles * walk.resident
        lengths = (rows, others) if shape.direction == "fwd" else (others, rows)
        return dataclasses.replace(
            shape, batch=1, seqlen_q=lengths[0], seqlen_k=lengths[1], heads_q=heads, heads_kv=heads
        )  # fmt: skip

    if shape.direction == "bwd" and shape.causal:  # a mask ends where both sides do: whole triangles
        return [(problem(n * walk.rows, n * walk.rows), n) for n in (2, 4, 6)]
    return [
        (problem(walk.rows, few), 1), (problem(walk.rows, 2 * few), 1), (problem(walk.rows, few, tiles=2), 2),
    ]  # fmt: skip


def _main(case: attention.Case, shape: BenchCase, tiles: Any) -> Recorded:
    """Run a problem on one emulated SM; the launch that multiplies."""
    small = dataclasses.replace(case, shape=shape)
    generator = torch.Generator().manual_seed(0)

    def normal(seqlen: int, heads: int) -> torch.Tensor:
        return torch.randn(1, seqlen, heads, shape.head_dim, generator=generator).to(torch.bfloat16)

    q, k, v = normal(shape.seqlen_q, shape.heads_q), *(normal(shape.seqlen_k, shape.heads_kv) for _ in range(2))
    with emulate(CHIP, sms=1, timing=True, checks=Checks(races=False, poison=False)) as gpu:
        inputs, spec = attention.inputs_of(shape, q, k, v), attention.spec_of(small)
        plan = attention.plan_of(small, chip_of(q.device), inputs.extent, tiles)
        if shape.direction == "fwd":
            own, others = (q,), (k, v)
            run.forward(inputs, spec, plan)
        else:  # of any forward: what the numbers are takes no time
            out, lse = normal(shape.seqlen_q, shape.heads_q), torch.full((1, shape.heads_q, shape.seqlen_q), 8.0)
            dout = normal(shape.seqlen_q, shape.heads_q)
            own, others = (k, v), (q, dout)
            run.backward(inputs, spec, plan, Saved(out, lse, dout))
    read = tuple((x.data_ptr(), x.data_ptr() + x.nbytes, any(x is y for y in own)) for x in (*own, *others))
    records = [launch.record for launch in gpu.launches if launch.record is not None]
    record = max(records, key=lambda record: sum(warp.executed for warp in record.warps))
    return Recorded(record, binary_of(record), issue_of(record), 1, read)


def recorded(case: attention.Case, chip: Chip, folder: Path) -> tuple[TileSchedule, list[Recorded]]:
    """The launches behind a prediction, from `folder` if they are there."""
    shape, extent = case.shape, _extent(case.shape)
    tiles = attention.tiles_of(case, chip, extent)
    walk = tile_schedule_of(attention.plan_of(case, chip, extent, tiles), shape.direction)
    is_alone = len(_steps(shape, walk)) * shape.heads_q * shape.batch <= chip.sms
    key = (case.backend, shape.direction, shape.head_dim, shape.causal, repr(tiles))
    key += case.lacks
    key += ("alone",) if is_alone and getattr(tiles, "blocks_per_sm", 1) > 1 else ()
    path = folder / (hashlib.sha256(repr(key).encode()).hexdigest()[:24] + ".pickle")
    if path.exists():
        resident, found = pickle.loads(path.read_bytes())
        walk = dataclasses.replace(walk, resident=resident)
        return walk, [dataclasses.replace(one, issue=_issue(one)) for one in found]
    first, _ = shapes_of(case, walk)[0]
    with skeletons.without(case.lacks):
        if not is_alone:
            one = _main(case, first, tiles)
            walk = dataclasses.replace(walk, resident=resident_ctas(one.record, one.issue.registers))
        found = [dataclasses.replace(_main(case, small, tiles), tiles=n) for small, n in shapes_of(case, walk)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps((walk.resident, found)))
    return walk, found


def _extent(shape: BenchCase) -> ProblemSize:
    return ProblemSize(shape.batch, shape.seqlen_q, shape.seqlen_k)


_issues: dict[bytes, Issue] = {}


def _issue(one: Recorded) -> Issue:
    """Not from the disk: what is known of instructions changes."""
    key = hashlib.sha256(one.binary + one.record.launch.ptx.encode()).digest()
    if key not in _issues:
        _issues[key] = issue_with(one.record, one.binary)
    return _issues[key]


@dataclass(frozen=True)
class Prediction:
    """cycles: of the kernel that multiplies, on the SM that has most to do. mean: over all SMs. cost: of a CTA. busy:
    unit -> share of the longer of the runs through one tile."""

    cycles: float
    mean: float
    cost: CtaCost
    tiles: int
    busy: dict[str, float]


def predict(case: attention.Case, chip: Chip, table: ChipTable, folder: Path) -> Prediction:
    """Replay what was recorded with a table's numbers, and hand tiles out.

    Raises:
        RuntimeError: the products are not those of the tiles that this takes the kernel to have.
    """
    walk, found = recorded(case, chip, folder)
    times = [replay(one.record, one.issue, table, ranges=_ranges(case.shape, walk, chip, one.inputs)) for one in found]
    small = [shape for shape, _ in shapes_of(case, walk)]
    # FLOPs of a step, and of a tile besides: fewer than none where a mask's edge cuts steps short.
    counts = np.array([[sum(_steps(shape, walk)) * shape.heads_q, one.tiles * walk.resident]
                       for shape, one in zip(small, found)], dtype=float)  # fmt: skip
    flops = np.array([one.flops for one in times])
    of_step, of_tile = np.linalg.lstsq(counts, flops, rcond=None)[0]
    if not np.allclose(counts @ [of_step, of_tile], flops, rtol=0.01):
        raise RuntimeError(f"{case.label}: {', '.join(map(str, flops))} FLOPs in {counts.tolist()} steps and tiles")
    samples = [Sample(one.tiles, t.flops / walk.resident, t.cycles) for one, t in zip(found, times)]
    cost = CtaCost.fitted(samples)
    pairs = case.shape.batch * case.shape.heads_q
    work = [of_step * n + of_tile for n in walk.steps_of_grid(_steps(case.shape, walk), pairs)]
    cycles = walk.cycles(work, chip.sms, cost, 0.0)
    if len(work) > 1:  # one CTA's cycles are measured without
        cycles += table.numbers["launch"].value
    places = walk.slots(chip.sms)
    mean = (min(len(work), places) * cost.start + sum(cost.tile + flops / cost.rate for flops in work)) / places
    return Prediction(cycles, mean, cost, len(work), times[1].shares())


_L2_BYTES = 50 << 20


def _ranges(shape: BenchCase, walk: TileSchedule, chip: Chip, inputs: tuple[tuple[int, int, bool], ...]) -> list[tuple]:
    """How many of the chip's SMs there are to each that reads something else of the inputs: all CTAs of a pair run
    together, and a short grid leaves SMs idle. Whether they come from DRAM: what fits in L2 is still there from whoever
    wrote it."""
    rows = shape.seqlen_q * shape.heads_q * (1 + (shape.direction == "bwd")) + 2 * shape.seqlen_k * shape.heads_kv
    cold = 2 * shape.batch * rows * shape.head_dim > _L2_BYTES
    tiles, places = len(_steps(shape, walk)), walk.slots(chip.sms)
    together = max(1, min(tiles, places // walk.l2_group))
    idle = max(1.0, places / (tiles * shape.heads_q * shape.batch))
    return [(begin, end, idle * (1 if alone else together), cold) for begin, end, alone in inputs]


def _steps(shape: BenchCase, walk: TileSchedule) -> list[int]:
    return walk.steps(shape.direction, shape.seqlen_q, shape.seqlen_k, shape.causal)
