"""How the warpgroups hand dQ to the warps that add it: one place for each warpgroup.

In a deterministic run a warpgroup's steps take turns on the barriers of several adding warps: one that waits for its
turn may be more than one step behind, further than the two parities of one barrier can tell. So each adding warp has
barriers of its own, and a step's dQ may be put into its place when the step before has left it, as the free barrier of
that step's warp says.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...core.vec_io import bits, store_vec
from ...pipeline.ends import End
from .config import Config
from .placement import WARPGROUP


class Handing:
    """A warpgroup's place in `compute_reduce_dQ` at some step: which warp adds (`adder`), at which phase. Immutable."""

    def __init__(self, end: End, cfg: Config, adder: Int32, phase: Int32):
        self.end, self.cfg, self.adder, self.phase = end, cfg, adder, phase

    @staticmethod
    def before_first(end: End, cfg: Config) -> Handing:
        """The step before the first: its place is free at once."""
        return Handing(end, cfg, Int32(cfg.reducers - 1), Int32(1))

    def next(self) -> Handing:
        """The step that follows."""
        adder = self.adder + 1
        wraps = Boolean(adder == self.cfg.reducers)
        adder, phase = cutlass.select_(wraps, Int32(0), adder), self.phase ^ Int32(wraps)
        return Handing(self.end, self.cfg, adder, phase)

    def give(self, context, consumer: Int32, dq: list[cute.Tensor]) -> None:
        """When this step's dQ has left a warpgroup's place, put the next one's there: four elements of every thread,
        then the next four."""
        elements = [product[i] for product in dq for i in range(cute.size(product))]
        self.end.wait_free(self.adder * self.cfg.dq_consumers + consumer, self.phase)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        place = context.smem.pointer("dQ", Float32) + consumer * (context.cfg.dq_bytes // 4) + 4 * thread
        for i in range(0, len(elements), 4):
            store_vec(place + i * WARPGROUP, [bits(x) for x in elements[i : i + 4]])

    def expect_tx(self, consumer: Int32) -> None:
        """Whole warp: its part of this step's dQ is in the warpgroup's place."""
        self.end.arrive_full(self.adder * self.cfg.dq_consumers + consumer)

    def __get_mlir_types__(self):
        return [self.adder.type, self.phase.type]

    def __extract_mlir_values__(self):
        return [self.adder.ir_value(), self.phase.ir_value()]

    def __new_from_mlir_values__(self, values):
        return Handing(self.end, self.cfg, Int32(values[0]), Int32(values[1]))
