"""PingPong on the matrix unit: teams issue their products one after the other, so that while one team's products run the
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
CONSUMER_THREADS = WARPS_PER_WARPGROUP * WARP


@dataclass(frozen=True)
class PingPong(Constant):
    """The turns of `consumers` teams as `consumer` sees them; nothing at all unless they are `active`."""

    consumers: cutlass.Constexpr[int]
    consumer: Int32
    active: cutlass.Constexpr[bool]

    def start(self) -> None:
        """The first turn is the first team's."""
        if self.active:
            _arrive_first(self)

    def wait(self) -> None:
        if self.active:
            cute.arch.barrier(barrier_id=FIRST_BARRIER + self.consumer, number_of_threads=2 * CONSUMER_THREADS)

    def arrive_next(self) -> None:
        if self.active:
            following = cutlass.select_(self.consumer == self.consumers - 1, Int32(0), self.consumer + 1)
            cute.arch.barrier_arrive(
                barrier_id=FIRST_BARRIER + Int32(following), number_of_threads=2 * CONSUMER_THREADS
            )


@cute.jit
def _arrive_first(ping_pong: cutlass.Constexpr[PingPong]):
    if ping_pong.consumer == ping_pong.consumers - 1:
        cute.arch.barrier_arrive(barrier_id=FIRST_BARRIER, number_of_threads=2 * CONSUMER_THREADS)
