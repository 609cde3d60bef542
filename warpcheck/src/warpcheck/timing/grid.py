"""From a few CTAs to a whole chip.

What a CTA takes is a start, an amount a tile and an amount a FLOP, found from replays of small problems; the grid hands
its tiles to the multiprocessors.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from warpcheck.timing.replay import Times


class Handing(Enum):
    """How tiles come to CTAs. STATIC: CTA i of n takes tiles i, i + n, ...; EACH: a CTA a tile, the next starts when
    one has ended; TAKEN: as EACH, but by CTAs that stay."""

    STATIC = "static"
    EACH = "each"
    TAKEN = "taken"


@dataclass(frozen=True)
class Sample:
    """One replayed SM, or what SMs did on average: tiles, FLOPs of its products, cycles in which it held a CTA."""

    tiles: int
    flops: float
    cycles: float

    @classmethod
    def of(cls, times: Times, tiles: int) -> Sample:
        """Of a launch whose SMs had this many tiles each on average, one CTA after the other or one for all. Who got
        which tile, and how long an SM then waited for the others' end, is no part of what a tile takes."""
        held = sum(end - start for start, end in times.ends.values())
        return cls(tiles, times.flops / times.sms, held / times.sms)


@dataclass(frozen=True)
class CtaCost:
    """Cycles of a CTA: start + tile * tiles + FLOPs / rate (FLOPs a cycle and SM in the steady state)."""

    start: float
    tile: float
    rate: float

    @classmethod
    def fitted(cls, samples: Sequence[Sample]) -> CtaCost:
        """Through two samples (a tile's cost is then part of the start) or the best through more.

        Raises:
            ValueError: the samples do not differ in FLOPs.
        """
        flops = np.array([s.flops for s in samples])
        if flops.max() == flops.min():
            raise ValueError("the samples have the same FLOPs: nothing can be said about the time of one")
        by_tiles = len({s.tiles for s in samples}) > 1
        columns = [np.ones(len(samples)), flops / flops.max()]
        if by_tiles:
            columns.append(np.array([float(s.tiles) for s in samples]))
        found = np.linalg.lstsq(np.stack(columns, 1), np.array([s.cycles for s in samples]), rcond=None)[0]
        return cls(float(found[0]), float(found[2]) if by_tiles else 0.0, float(flops.max() / found[1]))

    @classmethod
    def of_each(cls, samples: Sequence[Sample]) -> CtaCost:
        """From samples in which an SM ran a CTA for every tile.

        Raises:
            ValueError: the samples have the same FLOPs a tile.
        """
        if len({s.flops / s.tiles for s in samples}) < 2:
            raise ValueError("the samples have the same FLOPs a tile: nothing can be said about the time of one")
        most = max(s.flops for s in samples)
        columns = np.array([[s.tiles, s.flops / most] for s in samples])
        found = np.linalg.lstsq(columns, np.array([s.cycles for s in samples]), rcond=None)[0]
        return cls(float(found[0]), 0.0, float(most / found[1]))

    def cycles(self, tiles: int, flops: float) -> float:
        return self.start + self.tile * tiles + flops / self.rate


def makespan(
    tiles: Iterable[float], places: int, cost: CtaCost, handing: Handing, replace: float, *, snake: bool = False
) -> float:
    """Cycles until the last of `places` multiprocessors (or pairs) is done.

    tiles: FLOPs of each tile per SM, in the order in which they are handed out. replace: cycles until a new CTA runs
    where one has ended. snake: of STATIC, every other lap turns round: its first tile is the last CTA's.
    """
    work = [cost.tile + flops / cost.rate for flops in tiles]
    if handing is Handing.STATIC:
        ends = [cost.start] * min(places, len(work))
        for number, cycles in enumerate(work):
            lap, place = divmod(number, len(ends))
            ends[-1 - place if snake and lap % 2 else place] += cycles
        return max(ends)
    free = [cost.start if handing is Handing.TAKEN else 0.0] * places
    heapq.heapify(free)
    last = 0.0
    for number, cycles in enumerate(work):
        begin = heapq.heappop(free)
        end = begin + cycles
        if handing is Handing.EACH:
            end += cost.start + (replace if number >= places else 0.0)
        last = max(last, end)
        heapq.heappush(free, end)
    return last


def chain(
    tiles: Iterable[tuple[int, range]], places: int, cost: CtaCost, step: float, turn: float, replace: float
) -> float:
    """Cycles of a grid with a CTA a tile, whose tiles add to rows of sums in turn.

    tiles: the sum (a head's) and its rows that each adds to, in the order in which they start and in which they take
    turns at a row. step: FLOPs of a tile at one row, per SM. turn: cycles from when an addition may begin until the
    next tile's may. A tile works on one row while it waits for its turn at the one before.
    """
    cycles = step / cost.rate
    open_from: dict[tuple[int, int], float] = {}
    free = [0.0] * places
    heapq.heapify(free)
    last = 0.0
    for number, (head, rows) in enumerate(tiles):
        time = heapq.heappop(free) + (replace if number >= places else 0.0)
        end = time + cost.start + cost.tile
        added = 0.0
        for row in rows:
            end = max(end + cycles, added)
            added = max(end, open_from.get((head, row), 0.0))
            open_from[head, row] = added + turn
        end = max(end, added)
        last = max(last, end)
        heapq.heappush(free, end)
    return last
