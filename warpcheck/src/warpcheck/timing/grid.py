"""Time of a grid on a whole chip, from replays of a few CTAs.

A CTA costs a start, an amount per tile and an amount per FLOP, fitted to replays of small problems. The tile scheduler
distributes the tiles over the multiprocessors.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from warpcheck.timing.replay import Times


class TileScheduler(Enum):
    """How CTAs get tiles.

    STATIC: CTA i of n takes tiles i, i + n, ...; PER_CTA: one tile per CTA, the next CTA starts when one has ended;
    DYNAMIC: persistent CTAs take the next tile.
    """

    STATIC = "static"
    PER_CTA = "each"
    DYNAMIC = "taken"


@dataclass(frozen=True)
class Sample:
    """Tiles, FLOPs of the products and cycles with a CTA: of one replayed SM, or the mean over SMs."""

    tiles: float
    flops: float
    cycles: float

    @classmethod
    def of(cls, times: Times, tiles: float) -> Sample:
        """Return the mean over the SMs of a launch. tiles: mean per SM, with one CTA each or one CTA for all.

        The cycles exclude the time in which an SM waits for the last CTA of the launch.
        """
        held = sum(end - start for start, end in times.ends.values())
        return cls(tiles, times.flops / times.sms, held / times.sms)


@dataclass(frozen=True)
class CtaCost:
    """Cycles of a CTA: start + tile * tiles + FLOPs / rate. rate: FLOPs per cycle and SM in the steady state."""

    start: float
    tile: float
    rate: float

    @classmethod
    def fitted(cls, samples: Sequence[Sample]) -> CtaCost:
        """Fit the samples by least squares. Where all have one tile count, its cost is part of the start.

        Raises:
            ValueError: the samples do not differ in FLOPs.
        """
        flops = np.array([s.flops for s in samples])
        if flops.max() == flops.min():
            raise ValueError("the samples have the same FLOPs, so the time per FLOP is unknown")
        by_tiles = len({s.tiles for s in samples}) > 1
        columns = [np.ones(len(samples)), flops / flops.max()]
        if by_tiles:
            columns.append(np.array([float(s.tiles) for s in samples]))
        found = np.linalg.lstsq(np.stack(columns, 1), np.array([s.cycles for s in samples]), rcond=None)[0]
        rate = float(flops.max()) / float(found[1]) if found[1] else math.inf
        return cls(float(found[0]), float(found[2]) if by_tiles else 0.0, rate)

    @classmethod
    def of_each(cls, samples: Sequence[Sample]) -> CtaCost:
        """Fit samples in which an SM ran one CTA per tile.

        Raises:
            ValueError: the samples have the same FLOPs per tile.
        """
        if len({s.flops / s.tiles for s in samples}) < 2:
            raise ValueError("the samples have the same FLOPs per tile, so the time per FLOP is unknown")
        most = max(s.flops for s in samples)
        columns = np.array([[s.tiles, s.flops / most] for s in samples])
        found = np.linalg.lstsq(columns, np.array([s.cycles for s in samples]), rcond=None)[0]
        return cls(float(found[0]), 0.0, float(most / found[1]))

    def cycles(self, tiles: int, flops: float) -> float:
        return self.start + self.tile * tiles + flops / self.rate


def makespan(
    tiles: Iterable[float], slots: int, cost: CtaCost, scheduler: TileScheduler, replace: float, *, snake: bool = False
) -> float:
    """Return the cycles until the last of `slots` multiprocessors (or CTA pairs) is done.

    tiles: FLOPs of each tile per SM, in the order of the tile scheduler. replace: cycles between the end of a CTA and
    the start of the next CTA in its slot. snake: with STATIC, every other round goes from the last slot to the first.
    """
    work = [cost.tile + flops / cost.rate for flops in tiles]
    if scheduler is TileScheduler.STATIC:
        ends = [cost.start] * min(slots, len(work))
        for number, cycles in enumerate(work):
            round_, slot = divmod(number, len(ends))
            ends[-1 - slot if snake and round_ % 2 else slot] += cycles
        return max(ends)
    free = [cost.start if scheduler is TileScheduler.DYNAMIC else 0.0] * slots
    heapq.heapify(free)
    last = 0.0
    for number, cycles in enumerate(work):
        begin = heapq.heappop(free)
        end = begin + cycles
        if scheduler is TileScheduler.PER_CTA:
            end += cost.start + (replace if number >= slots else 0.0)
        last = max(last, end)
        heapq.heappush(free, end)
    return last


def shared_makespan(tiles: Iterable[float], sms: int, resident: int, cost: CtaCost, alone: float) -> float:
    """Return the cycles of a grid of which each multiprocessor holds up to `resident` CTAs, one per tile.

    tiles: FLOPs of each tile, in the order of the launch. cost: of a CTA among `resident`. alone: how much faster a CTA
    is without others. Of n CTAs, each is `min(alone, resident / n)` times as fast: the units are then as busy as with
    `resident`, or each CTA waits for itself.
    """
    work = [cost.tile + flops / cost.rate for flops in tiles]
    left: list[list[float]] = [[] for _ in range(sms)]  # cycles of its CTAs on each multiprocessor, among `resident`
    since = [0.0] * sms
    coming = iter(work)
    for _ in range(resident):
        for held, cycles in zip(left, coming):
            held.append(cycles + cost.start)

    def next_end(sm: int) -> tuple[float, int]:
        held = left[sm]
        return since[sm] + min(held) / min(alone, resident / len(held)), sm

    events = [next_end(sm) for sm in range(sms) if left[sm]]
    heapq.heapify(events)
    now = 0.0
    while events:
        now, sm = heapq.heappop(events)
        held = left[sm]
        done = min(held)
        held[:] = [cycles - done for cycles in held]
        held.remove(min(held))
        since[sm] = now
        held.extend(itertools.islice(coming, 1))
        if held:
            heapq.heappush(events, next_end(sm))
    return now


def ordered_makespan(
    tiles: Iterable[tuple[int, range]], slots: int, cost: CtaCost, step: float, interval: float, replace: float
) -> float:
    """Return the cycles of a grid with one tile per CTA, whose tiles add to rows of sums in a fixed order.

    tiles: (sum, rows to which the tile adds), in the order of their starts, which is also the order of additions to a
    row. Each head has its sum. step: FLOPs of a tile for one row, per SM. interval: cycles between the earliest start
    of an addition to a row and that of the next tile. A tile computes one row while it waits to add the row before.
    """
    cycles = step / cost.rate
    open_from: dict[tuple[int, int], float] = {}
    free = [0.0] * slots
    heapq.heapify(free)
    last = 0.0
    for number, (head, rows) in enumerate(tiles):
        time = heapq.heappop(free) + (replace if number >= slots else 0.0)
        end = time + cost.start + cost.tile
        added = 0.0
        for row in rows:
            end = max(end + cycles, added)
            added = max(end, open_from.get((head, row), 0.0))
            open_from[head, row] = added + interval
        end = max(end, added)
        last = max(last, end)
        heapq.heappush(free, end)
    return last
