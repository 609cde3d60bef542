"""Cycles of a sequence of slots for one warp alone on an SM."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from warpcheck.timing.sass.control import SCOREBOARDS
from warpcheck.timing.sass.issue import Slot

# Cycles from the issue until the operands are read. A guess (C): about the value of stores on sm_80.
READ_CYCLES = 12


@dataclass(frozen=True)
class Alone:
    """issued: clock of the issue of each slot. cycles: until the next issue. done: until all scoreboards are zero."""

    issued: tuple[float, ...]
    cycles: float
    done: float


def cycles_alone(slots: Sequence[Slot]) -> Alone:
    """Clocks from 0: a slot issues when the stall before it is over, its scoreboards are at zero and its pipe is free.

    Times of memory, barriers and tensor cores are not included: a scoreboard of a pipe without a latency in the table
    falls after READ_CYCLES.
    """
    clock = 0.0
    free: dict[str, float] = defaultdict(float)
    pending: list[list[float]] = [[] for _ in range(SCOREBOARDS)]
    issued = []
    for slot in slots:
        for board in range(SCOREBOARDS):
            if slot.wait >> board & 1:
                clock = max([clock, *pending[board]])
                pending[board].clear()
        if slot.until is not None:
            board, left = slot.until
            falls = sorted(pending[board])
            clock = max([clock, *falls[: len(falls) - left]])
        clock = max(clock, free[slot.pipe])
        issued.append(clock)
        free[slot.pipe] = clock + slot.occupancy
        if slot.written is not None:
            takes = max(slot.latency, slot.occupancy) if slot.latency else READ_CYCLES
            pending[slot.written].append(clock + takes)
        if slot.read is not None:
            pending[slot.read].append(clock + READ_CYCLES)
        clock += max(slot.stall, 1)
    return Alone(tuple(issued), clock, max([clock, *(at for board in pending for at in board)]))
