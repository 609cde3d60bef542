"""Turns on the matrix unit: teams issue their products one after the other, so that while one team's products run the
others have time for softmax.

A named barrier per team: the team before arrives at it, the team itself waits at it. Every team must take as many turns
as the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...core.constant import Constant
from ...pipeline.roles import WARP, WARPS_PER_WARPGROUP

FIRST_BARRIER = 1  # barrier 0 is that of all threads
TEAM_THREADS = WARPS_PER_WARPGROUP * WARP


@dataclass(frozen=True)
class Turns(Constant):
    """The turns of `teams` teams as `team` sees them; nothing at all unless they are `taken`."""

    teams: cutlass.Constexpr[int]
    team: Int32
    taken: cutlass.Constexpr[bool]

    def start(self) -> None:
        """The first turn is the first team's."""
        if self.taken:
            _pass_to_first(self)

    def wait(self) -> None:
        if self.taken:
            cute.arch.barrier(barrier_id=FIRST_BARRIER + self.team, number_of_threads=2 * TEAM_THREADS)

    def pass_on(self) -> None:
        if self.taken:
            following = cutlass.select_(self.team == self.teams - 1, Int32(0), self.team + 1)
            cute.arch.barrier_arrive(barrier_id=FIRST_BARRIER + Int32(following), number_of_threads=2 * TEAM_THREADS)


@cute.jit
def _pass_to_first(turns: cutlass.Constexpr[Turns]):
    if turns.team == turns.teams - 1:
        cute.arch.barrier_arrive(barrier_id=FIRST_BARRIER, number_of_threads=2 * TEAM_THREADS)
