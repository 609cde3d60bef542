"""Cycles that one warp alone on an SM takes for a run of slots, with nobody to wait for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from warpcheck.timing.sass.control import SCOREBOARDS
from warpcheck.timing.sass.issue import Slot

# Operands leave the registers this long after the issue. A guess (C): stores of sm_80 hold theirs about as long.
READ_CYCLES = 12


@dataclass(frozen=True)
class Alone:
    """issued: clock at which the slot issued, by slot. cycles: until the warp could issue what follows. done: until all
    scoreboards were at zero."""

    issued: tuple[float, ...]
    cycles: float
    done: float


def cycles_alone(slots: Sequence[Slot]) -> Alone:
    """Clocks from 0: a slot issues when the stall before it is over, its scoreboards are at zero and its pipe is free.

    What memory, barriers and tensor cores take is not in it: a scoreboard whose pipe has no latency in the table falls
    after READ_CYCLES.
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
