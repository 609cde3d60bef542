"""Transfer of dQ from the consumers to the reduce warps: one buffer per consumer.

In a deterministic run the reduce warps take the steps round-robin. A warp that waits for its semaphore may be more than
one step behind, and the two parities of one barrier cannot distinguish that. So each reduce warp has its own barriers.
A consumer may store the dQ of a step after the dQ of the step before has left the buffer: it waits for the free barrier
of that step's reduce warp.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...core.vec_io import bits, store_vec
from ...pipeline.ends import End
from .common.config import WARPGROUP
from .config import Sm90BackwardConfig
from .context import Sm90BackwardContext


class DqCursor:
    """Consumer's cursor in `compute_reduce_dQ`: the warp that adds (`reducer`) and its phase. Immutable."""

    def __init__(self, end: End, cfg: Sm90BackwardConfig, reducer: Int32, phase: Int32):
        self.end, self.cfg, self.reducer, self.phase = end, cfg, reducer, phase

    @staticmethod
    def before_first(end: End, cfg: Sm90BackwardConfig) -> DqCursor:
        """Return the cursor of the step before the first: its buffer is free."""
        return DqCursor(end, cfg, Int32(cfg.reducers - 1), Int32(1))

    def next(self) -> DqCursor:
        """Return the cursor of the next step."""
        reducer = self.reducer + 1
        wraps = Boolean(reducer == self.cfg.reducers)
        reducer, phase = cutlass.select_(wraps, Int32(0), reducer), self.phase ^ Int32(wraps)
        return DqCursor(self.end, self.cfg, reducer, phase)

    def wait(self, consumer: Int32) -> None:
        """Wait until the dQ of this step has left the consumer's buffer."""
        self.end.wait_free(self.reducer * self.cfg.dq_consumers + consumer, self.phase)

    def store(self, context: Sm90BackwardContext, consumer: Int32, dq: list[cute.Tensor]) -> None:
        """Wait until the dQ of this step has left the consumer's buffer, then store the next dQ there: four elements of
        every thread, then the next four."""
        values = [product[i] for product in dq for i in range(cute.size(product))]
        self.wait(consumer)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        ptr = context.smem.pointer("dQ", Float32) + consumer * (context.cfg.dq_bytes // 4) + 4 * thread
        for i in range(0, len(values), 4):
            store_vec(ptr + i * WARPGROUP, [bits(x) for x in values[i : i + 4]])

    def wait_sum(self, end: End) -> None:
        """Wait until the other key blocks have added to dQ of this step. end: of `reduce_compute_sum`, which has a
        stage for each reduce warp."""
        end.wait_full(self.reducer, self.phase)

    def arrive(self, consumer: Int32) -> None:
        """Whole warp: signal that its part of this step's dQ is in the consumer's buffer."""
        self.end.arrive_full(self.reducer * self.cfg.dq_consumers + consumer)

    def __extract_mlir_values__(self):
        return [self.reducer.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values):
        return DqCursor(self.end, self.cfg, Int32(values[0]), Int32(values[1]))
