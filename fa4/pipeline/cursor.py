"""Cursor: a role's position in a channel, that is its next stage and the phase of the barrier to wait for.

    keys = consume(ends.load_mma_KV)            # or produce(...)
    for ...:
        keys.wait()
        ... keys.stage ...
        keys.commit()                            # or arrive(): the stage is free (a producer's: full)
        keys = keys.next()

A barrier's phases alternate between the parities 0 and 1. A consumer first waits for phase 0: the first fill. A
producer first waits for the phase before it (parity 1). A new barrier counts that phase as completed, so all stages
are free at first.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from .channels import By
from .ends import LEADER, End, Stage

ALL = "all stages in each iteration"


class Lane(NamedTuple):
    """Every `step`-th stage from `first`: the share of a ring that one of `step` instances uses."""

    first: Stage
    step: int


def consume(end: End, stage: Stage | Lane | str | None = None) -> Cursor:
    """Consumer's cursor before the first iteration. stage: None (the whole ring), a `Lane`, a fixed stage, or `ALL`."""
    return Cursor.at_start(end, False, stage)


def produce(end: End, stage: Stage | Lane | str | None = None, ahead: int = 0) -> Cursor:
    """Producer's cursor before the first iteration, or `ahead` iterations later: that many need no wait, because the
    stages are free at first. In a ring, `ahead` counts rounds. stage: as in `consume`."""
    return Cursor.at_start(end, True, stage, ahead)


class Cursor:
    """One role's position in one channel. Immutable: `cursor = cursor.next()`.

    stage: the current stage. A cursor moves through the ring by `step` stages (`moves`), or stays at a fixed stage, or
    is at `ALL` stages in each iteration; the caller then names the stage of each operation.
    """

    def __init__(
        self, end: End, produces: bool, stage: Stage | str, phase: Int32, first_phase: int, moves: bool, step: int = 1
    ):
        self.end, self.produces, self.stage, self.phase = end, produces, stage, phase
        self.first_phase, self.moves, self.step = first_phase, moves, step

    @staticmethod
    def at_start(end: End, produces: bool, stage: Stage | Lane | str | None = None, ahead: int = 0) -> Cursor:
        """See `consume` and `produce`."""
        step = 1
        if isinstance(stage, Lane):
            if end.channel.stages % stage.step:
                raise ValueError(f"channel {end.channel.name}: {end.channel.stages} stages have no {stage.step} lanes")
            step, stage = stage.step, stage.first if stage.step == end.channel.stages else stage
        moves = isinstance(stage, Lane) or (stage is None and end.channel.stages > 1)
        first_phase = (1 if produces else 0) ^ (ahead & 1)
        start = 0 if stage is None else stage
        if moves:
            start = Int32(stage.first if isinstance(stage, Lane) else 0)
        return Cursor(end, produces, start, Int32(first_phase), first_phase, moves, step)

    def at_iteration_of(self, other: Cursor) -> Cursor:
        """Return `other`, a new cursor of another channel, moved to this cursor's iteration. Both channels advance
        together, so they share one phase; rings of equal length also share the stage, and the lane in the ring."""
        mine, others = self.end.channel, other.end.channel
        ring, other_ring = (mine.stages, self.step), (others.stages, other.step)
        if self.moves != other.moves or (self.moves and ring != other_ring):
            raise ValueError(f"channels {mine.name} and {others.name}: other rings or lanes do not go in step")
        phase = self.phase ^ 1 if self.first_phase != other.first_phase else self.phase
        stage = self.stage if other.moves else other.stage
        return Cursor(other.end, other.produces, stage, phase, other.first_phase, other.moves, other.step)

    def next(self) -> Cursor:
        """Return the cursor of the next iteration."""
        stage, phase = self.stage, self.phase
        if self.moves:
            assert not isinstance(stage, str)  # not `ALL`
            stages = self.end.channel.stages
            stage = stage + self.step
            wraps = Boolean(stage >= stages if self.step > 1 else stage == stages)
            start = stage - stages if self.step > 1 else Int32(0)
            stage, phase = cutlass.select_(wraps, start, stage), phase ^ Int32(wraps)
        else:
            phase = phase ^ 1
        return Cursor(self.end, self.produces, stage, phase, self.first_phase, self.moves, self.step)

    def wait(self, stage: Stage | None = None) -> None:
        """Block until the stage is full (a consumer) or free (a producer)."""
        wait = self.end.wait_free if self.produces else self.end.wait_full
        wait(self._stage(stage), self.phase)

    def arrive(self, stage: Stage | None = None) -> None:
        """Whole warp: signal that this warp has filled the stage (a producer), or release it (a consumer)."""
        if self.produces:
            self.end.arrive_full(self._stage(stage))
        elif self.end.channel.freed is By.WARP:
            self.end.arrive_free(self._stage(stage))
        else:
            self.end.arrive_read(self._stage(stage))

    def arrive_after(self, other: Cursor) -> None:
        """Whole warp of a consumer by WARP: release the stage directly after a release by `other`, by the same
        fence."""
        self.end.arrive_free_after(other.end, self._stage(None))

    def commit(self, stage: Stage | None = None) -> None:
        """One thread: signal full (a producer) or free (a consumer) when the matrix operations issued so far are
        done."""
        commit = self.end.commit_full if self.produces else self.end.commit_free
        commit(self._stage(stage))

    def expect_tx(self, nbytes: int, rank: Stage = LEADER, stage: Stage | None = None) -> None:
        """Producer by TMA, whole warp of each CTA: `nbytes` of copies (in each CTA of a pair) will signal full."""
        _expect_tx(self.end, self._stage(stage), nbytes, rank)

    def store(self, address: cute.Pointer, words: list[Int32], stage: Stage | None = None) -> None:
        """Producer by STORE, one thread of the leader: fill the stage with words, in the shared memory of each CTA."""
        self.end.store_full(self._stage(stage), address, words)

    def query(self, response: cute.Pointer, stage: Stage | None = None) -> None:
        """Producer by STORE, one thread of the leader: fill the stage with a response of cluster launch control, in the
        shared memory of each CTA."""
        self.end.query_full(self._stage(stage), response)

    def barrier(self, stage: Stage | None = None) -> cute.Pointer:
        """The full barrier, on which copies count their bytes."""
        return self.end.full(self._stage(stage))

    def _stage(self, stage: Stage | None) -> Stage:
        if (stage is None) == (self.stage is ALL):
            raise ValueError(f"channel {self.end.channel.name}: a cursor at {self.stage} was asked about {stage}")
        return self.stage if stage is None else stage

    def _carried(self) -> list:
        return [self.stage, self.phase] if self.moves else [self.phase]

    def __extract_mlir_values__(self):
        return [value.ir_value() for value in self._carried()]

    def __new_from_mlir_values__(self, values):
        carried = [Int32(value) for value in values]
        stage = carried[0] if self.moves else self.stage
        return Cursor(self.end, self.produces, stage, carried[-1], self.first_phase, self.moves, self.step)


@cute.jit
def _expect_tx(end: cutlass.Constexpr[End], stage: Stage, nbytes: cutlass.Constexpr[int], rank: Int32):
    """Call `expect`; in a pair only the leader does, for both CTAs."""
    if const_expr(not end.channel.is_pair):
        end.expect(stage, nbytes)
    else:
        if rank == LEADER:
            end.expect(stage, nbytes)
