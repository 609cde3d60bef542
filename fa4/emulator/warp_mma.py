"""Predicted time of kernels whose warps multiply with mma.sync, on chips where a multiprocessor may hold several CTAs.

One multiprocessor is replayed with as many CTAs as its shared memory, threads and registers allow. A *slot* is the
place of one of them: CTAs of a slot run one after the other. Two lengths give the rate of a slot, two tiles against one
the cost of a tile.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from warpcheck.machine.record import Record
from warpcheck.timing.chips import ChipTable
from warpcheck.timing.code import issue_of
from warpcheck.timing.grid import CtaCost, Sample, TileScheduler, shared_makespan
from warpcheck.timing.replay import Times, replay, resident_ctas

from fa4.emulator.attention import Problem, Shape, own_plan, recorded
from fa4.emulator.tile_schedule import TileSchedule, tile_schedule_of
from fa4.runtime.device import chip_by_target

CHIPS = ("sm_120a", "sm_121a")
_SHORT = 640  # rows of the other side in the shorter of two replays, or at least four steps
_FLASH_ATTN_4 = {"fwd": {64: (128, 128), 128: (128, 64)}, "bwd": {64: (64, 64), 128: (64, 64)}}  # rows and step


@dataclass(frozen=True)
class SlotReplays:
    """Replays of a main kernel on one multiprocessor.

    tiles: of a slot, in each launch. others: kernels before and after a backward's main kernel, of the second launch.
    alone: the first two launches with one CTA; None if a multiprocessor holds no more.
    """

    schedule: TileSchedule
    shapes: tuple[Shape, ...]
    tiles: tuple[int, ...]
    times: tuple[Times, ...]
    others: tuple[Times, ...]
    alone: tuple[Times, ...] | None

    @property
    def samples(self) -> list[Sample]:
        resident = self.schedule.resident
        return [Sample(n, times.flops / resident, times.cycles) for n, times in zip(self.tiles, self.times)]

    @property
    def speedup_alone(self) -> float:
        """Return how much faster a CTA is without the others of its multiprocessor, in the steady state."""
        if self.alone is None:
            return 1.0
        short, long = self.alone
        rate = (long.flops - short.flops) / (long.cycles - short.cycles)
        return rate / CtaCost.fitted(self.samples).rate

    def work(self, problem: Problem) -> list[float]:
        """Return the FLOPs of each tile of the problem's grid, in the order of the kernel.

        Raises:
            RuntimeError: the kernel's tiles are not those of the schedule.
        """
        # A tile has FLOPs besides its steps: negative where the edge of a mask cuts steps short.
        counts = np.array([
            [sum(self._steps(problem, shape)) * shape.heads, tiles * self.schedule.resident]
            for shape, tiles in zip(self.shapes, self.tiles)
        ], dtype=float)  # fmt: skip
        flops = np.array([times.flops for times in self.times])
        of_step, of_tile = np.linalg.lstsq(counts, flops, rcond=None)[0]
        if not np.allclose(counts @ [of_step, of_tile], flops, rtol=0.01):
            found = f"{flops.tolist()} FLOPs, {counts.tolist()} steps and tiles"
            raise RuntimeError(f"the kernel's tiles are not those of its schedule: {found}")
        steps = self._steps(problem, Shape(problem.seqlen, problem.keys or problem.seqlen, problem.heads))
        pairs = problem.batch * problem.heads
        return [of_step * n + of_tile for n in self.schedule.steps_of_grid(steps, pairs)]

    def cycles(self, problem: Problem, sms: int) -> float:
        """Return the cycles of the main kernel on a whole chip."""
        cost, work = CtaCost.fitted(self.samples), self.work(problem)
        if self.schedule.resident == 1 or self.schedule.scheduler is TileScheduler.STATIC:
            return self.schedule.cycles(work, sms, cost, 0.0)  # a tile's cost contains the exchange of CTAs
        return shared_makespan(work, sms, self.schedule.resident, cost, self.speedup_alone)

    def _steps(self, problem: Problem, shape: Shape) -> list[int]:
        return self.schedule.steps(problem.direction, shape.queries, shape.keys, problem.causal)


def replay_slots(
    problem: Problem, table: ChipTable, package: str, tiles: Any = None, backend: str = "auto", timeline: bool = False
) -> SlotReplays:
    """Replay a problem's kernels.

    tiles: row of fa4's table of the direction [default: the problem's]. backend: of fa4.

    Raises:
        ValueError: the head dim, or a launch with split keys, is not predicted.
    """
    schedule, row = _schedule(problem, table, package, tiles, backend)
    small = dataclasses.replace(problem, batch=1, seqlen=0, heads=1, keys=None)

    def records(shape: Shape) -> tuple[Record, ...]:
        return recorded(table.chip, package, small, 1, shape, row, backend)

    def main(shape: Shape) -> Times:
        return replay(next(filter(_multiplies, records(shape))), chip=table, timeline=timeline)

    (first, second), short = _shapes(small, schedule)[:2], None
    rows = math.ceil((problem.seqlen if problem.direction == "fwd" else problem.keys or problem.seqlen) / schedule.rows)
    if rows * problem.batch * problem.heads > table.sms:  # else each CTA has a multiprocessor
        record = next(filter(_multiplies, records(first[0])))
        schedule = dataclasses.replace(schedule, resident=resident_ctas(record, issue_of(record).registers))
        short = tuple(main(shape) for shape, _ in (first, second)) if schedule.resident > 1 else None
    shapes, of_slot = zip(*_shapes(small, schedule))
    others = tuple(replay(r, chip=table) for r in records(shapes[1]) if not _multiplies(r))
    return SlotReplays(schedule, shapes, of_slot, tuple(map(main, shapes)), others, short)


def _schedule(problem: Problem, table: ChipTable, package: str, tiles: Any, backend: str) -> tuple[TileSchedule, Any]:
    """Return the schedule of the whole grid, and the row of fa4's table."""
    if package == "fa4":
        chip = chip_by_target(table.chip, sms=table.sms)
        plan = own_plan(problem, chip, problem.seqlen, problem.keys or problem.seqlen, tiles, backend)
        if problem.direction == "fwd" and plan.splits > 1:
            raise ValueError("forwards with split keys are not predicted on this chip")
        direction = plan._forward if problem.direction == "fwd" else plan._backward
        return tile_schedule_of(plan, problem.direction), direction.choice.row
    if package != "flash-attn-4" or problem.head_dim not in _FLASH_ATTN_4["fwd"]:
        raise ValueError(f"{package}: head_dim {problem.head_dim} on {table.chip} is not predicted")
    rows, step = _FLASH_ATTN_4[problem.direction][problem.head_dim]
    return TileSchedule(rows, step, TileScheduler.DYNAMIC), None


def _multiplies(record: Record) -> bool:
    return any(instruction.parts[0] == "mma" for instruction in record.kernel.instructions)


def _shapes(problem: Problem, schedule: TileSchedule) -> list[tuple[Shape, int]]:
    """Return what is emulated, and the tiles of a slot in it."""
    short = schedule.step * max(4, math.ceil(_SHORT / schedule.step))

    def shape(rows: int, others: int, tiles: int = 1) -> Shape:
        lengths = (rows, others) if problem.direction == "fwd" else (others, rows)
        return Shape(*lengths, tiles * schedule.resident)

    if problem.direction == "bwd" and problem.causal:  # a mask ends where both sides do: whole triangles
        return [(shape(n * schedule.rows, n * schedule.rows), n) for n in (2, 4, 6)]
    return [(shape(schedule.rows, short), 1), (shape(schedule.rows, 2 * short), 1), (shape(schedule.rows, short, 2), 2)]
