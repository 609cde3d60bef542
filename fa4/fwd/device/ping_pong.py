"""Ping-pong order of the consumers on the tensor cores: consumers issue their products one after the other, so the
products of one consumer overlap with the softmax of the others.

Each consumer waits at its own named barrier, and the consumer before it arrives there. All consumers must call `wait`
and `arrive_next` equally often.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...core.constant import Constant
from ...pipeline.roles import WARP, WARPS_PER_WARPGROUP

FIRST_BARRIER = 1  # barrier 0 is the CTA barrier
CONSUMER_THREADS = WARPS_PER_WARPGROUP * WARP


@dataclass(frozen=True)
class PingPong(Constant):
    """Ping-pong order of `consumers` warpgroups, seen by warpgroup `consumer`. Does nothing unless `active`."""

    consumers: cutlass.Constexpr[int]
    consumer: Int32
    active: cutlass.Constexpr[bool]

    @cute.jit
    def start(self):
        """Let the first consumer go first."""
        if const_expr(self.active):  # noqa: SIM102  one is decided at compile time
            if self.consumer == self.consumers - 1:
                cute.arch.barrier_arrive(barrier_id=FIRST_BARRIER, number_of_threads=2 * CONSUMER_THREADS)

    def wait(self) -> None:
        if self.active:
            cute.arch.barrier(barrier_id=FIRST_BARRIER + self.consumer, number_of_threads=2 * CONSUMER_THREADS)

    def arrive_next(self) -> None:
        if self.active:
            following = cutlass.select_(self.consumer == self.consumers - 1, Int32(0), self.consumer + 1)
            cute.arch.barrier_arrive(
                barrier_id=FIRST_BARRIER + Int32(following), number_of_threads=2 * CONSUMER_THREADS
            )
