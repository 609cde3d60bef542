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

from bench.suites import BenchCase
from fa4 import run
from fa4.device import Chip, chip_of
from fa4.emulator import emulate
from fa4.emulator.machine import Checks
from fa4.emulator.machine.chips import RESERVED_SHARED, chip_facts
from fa4.emulator.machine.record import Record
from fa4.emulator.timing.chips import ChipTable
from fa4.emulator.timing.code import binary_of, issue_of, issue_with
from fa4.emulator.timing.grid import CtaCost, Handing, Sample, makespan
from fa4.emulator.timing.issue import Issue
from fa4.emulator.timing.replay import replay
from fa4.emulator.timing.sass.code import registers
from fa4.spec import Extent, Saved

from . import attention

CHIP = "sm_90a"
_LEAST = 640  # rows or keys of the shorter of two runs through one tile


@dataclass(frozen=True)
class Walk:
    """How a kernel goes through a problem. rows: of its work tile (query rows forward, keys backward). step: of the
    other side, in one step. resident: CTAs that an SM has at a time. handing: of tiles to CTAs; to_and_fro: laps of a
    persistent grid turn round."""

    rows: int
    step: int
    resident: int
    handing: Handing
    to_and_fro: bool = False


def walk_of(case: attention.Case, tiles: Any, resident: int = 1) -> Walk:
    """Of a row of tiles. resident: as its registers and shared memory allow."""
    is_forward = case.shape.direction == "fwd"
    if case.backend == "sm80":
        rows, step = (tiles.tile_m, tiles.tile_n) if is_forward else (tiles.tile_n, tiles.tile_m)
        return Walk(rows, step, resident, Handing.TAKEN)
    if not is_forward:
        return Walk(128, tiles.tile_m, resident, Handing.TAKEN)
    persistent = tiles.schedule.name == "PERSISTENT"
    return Walk(64 * tiles.teams, tiles.tile_n, resident, Handing.STATIC if persistent else Handing.TAKEN, persistent)


@dataclass(frozen=True)
class Recorded:
    """One launch on one SM: what it did, its machine code, what its warps issue, and tiles that a place (a CTA's, of
    those that an SM has at a time) went through."""

    record: Record
    binary: bytes
    issue: Issue
    tiles: int


def shapes_of(case: attention.Case, walk: Walk) -> list[tuple[BenchCase, int]]:
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
            run.forward(inputs, spec, plan)
        else:  # of any forward: what the numbers are takes no time
            out, lse = normal(shape.seqlen_q, shape.heads_q), torch.full((1, shape.heads_q, shape.seqlen_q), 8.0)
            run.backward(inputs, spec, plan, Saved(out, lse, normal(shape.seqlen_q, shape.heads_q)))
    records = [launch.record for launch in gpu.launches if launch.record is not None]
    record = max(records, key=lambda record: sum(warp.executed for warp in record.warps))
    return Recorded(record, binary_of(record), issue_of(record), 1)


_REGISTERS, _REGISTER_STEP = 65536, 8  # of an SM; those of a thread come in steps


def _resident(recorded: Recorded) -> int:
    """CTAs that an SM has at a time: by shared memory, threads and registers."""
    facts, record = chip_facts(CHIP), recorded.record
    launch = record.launch
    threads = math.prod(launch.block)
    each = math.ceil(registers(recorded.binary) / _REGISTER_STEP) * _REGISTER_STEP
    static = sum(v.nbytes for v in record.kernel.variables.values() if v.space == "shared")
    shared = facts.smem_per_sm // (launch.smem_bytes + static + RESERVED_SHARED)
    return max(1, min(shared, facts.threads_per_sm // threads, _REGISTERS // (each * threads)))


def recorded(case: attention.Case, chip: Chip, folder: Path) -> tuple[Walk, list[Recorded]]:
    """The launches behind a prediction, from `folder` if they are there."""
    shape = case.shape
    tiles = attention.tiles_of(case, chip, Extent(shape.batch, shape.seqlen_q, shape.seqlen_k))
    walk = walk_of(case, tiles)
    is_alone = len(_steps(shape.direction, shape, walk)) * shape.heads_q * shape.batch <= chip.sms
    key = (case.backend, shape.direction, shape.head_dim, shape.causal, repr(tiles))
    key += ("alone",) if is_alone and getattr(tiles, "blocks_per_sm", 1) > 1 else ()
    path = folder / (hashlib.sha256(repr(key).encode()).hexdigest()[:24] + ".pickle")
    if path.exists():
        walk, found = pickle.loads(path.read_bytes())
        return walk, [dataclasses.replace(one, issue=_issue(one)) for one in found]
    first, _ = shapes_of(case, walk)[0]
    if not is_alone:
        walk = dataclasses.replace(walk, resident=_resident(_main(case, first, tiles)))
    found = [dataclasses.replace(_main(case, small, tiles), tiles=n) for small, n in shapes_of(case, walk)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps((walk, found)))
    return walk, found


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
    times = [replay(one.record, one.issue, table) for one in found]
    small = [shape for shape, _ in shapes_of(case, walk)]
    # FLOPs of a step, and of a tile besides: fewer than none where a mask's edge cuts steps short.
    counts = np.array([[sum(_steps(shape.direction, shape, walk)) * shape.heads_q, one.tiles * walk.resident]
                       for shape, one in zip(small, found)], dtype=float)  # fmt: skip
    flops = np.array([one.flops for one in times])
    of_step, of_tile = np.linalg.lstsq(counts, flops, rcond=None)[0]
    if not np.allclose(counts @ [of_step, of_tile], flops, rtol=0.01):
        raise RuntimeError(f"{case.label}: {', '.join(map(str, flops))} FLOPs in {counts.tolist()} steps and tiles")
    samples = [Sample(one.tiles, t.flops / walk.resident, t.cycles) for one, t in zip(found, times)]
    cost = CtaCost.fitted(samples)
    work = [of_step * n + of_tile if n else 0.0 for n in _ordered(case, chip, walk)]
    cycles = makespan(work, chip.sms * walk.resident, cost, walk.handing, 0.0)
    if len(work) > 1:  # one CTA's cycles are measured without
        cycles += table.numbers["launch"].value
    places = min(len(work), chip.sms * walk.resident)
    mean = (places * cost.start + sum(cost.tile + flops / cost.rate for flops in work)) / places
    return Prediction(cycles, mean, cost, len(work), times[1].shares())


def _steps(direction: str, shape: BenchCase, walk: Walk) -> list[int]:
    """Of each work tile of one head, in the order of tiles."""
    if direction == "fwd":
        tiles, last = math.ceil(shape.seqlen_q / walk.rows), shape.seqlen_k - shape.seqlen_q
        ends = [last + (i + 1) * walk.rows if shape.causal else shape.seqlen_k for i in range(tiles)]
        return [math.ceil(min(shape.seqlen_k, end) / walk.step) for end in ends]
    tiles, stop = math.ceil(shape.seqlen_k / walk.rows), math.ceil(shape.seqlen_q / walk.step)
    return [stop - (i * walk.rows // walk.step if shape.causal else 0) for i in range(tiles)]


def _ordered(case: attention.Case, chip: Chip, walk: Walk) -> list[int]:
    """Steps of all tiles in the order in which they are handed out: in each section of pairs the longest first."""
    shape = case.shape
    pairs = shape.batch * shape.heads_q
    of_head = sorted(_steps(shape.direction, shape, walk), reverse=True)
    section = 4 if case.backend == "sm80" and shape.causal else 1
    if shape.direction == "fwd":
        extent = Extent(shape.batch, shape.seqlen_q, shape.seqlen_k)
        plan = attention.plan_of(case, chip, extent, attention.tiles_of(case, chip, extent))
        section = int(plan._forward.sizes[2])
    order = [
        steps for first in range(0, pairs, section) for steps in of_head for _ in range(min(section, pairs - first))
    ]  # fmt: skip
    if not walk.to_and_fro:
        return order
    laps = [order[i : i + chip.sms] for i in range(0, len(order), chip.sms)]
    whole = [lap[::-1] if i % 2 and len(lap) == chip.sms else lap for i, lap in enumerate(laps)]
    if len(laps) % 2 == 0 and len(laps[-1]) < chip.sms:  # the last lap's first tiles are those of the last CTAs
        whole[-1] = [0] * (chip.sms - len(laps[-1])) + laps[-1][::-1]
    return [steps for lap in whole for steps in lap]
