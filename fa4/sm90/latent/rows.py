"""Numbers of rows that both warpgroups share, and their barrier."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.constant import Constant
from ...core.vec_io import bits, load_floats, store_vec
from ...pipeline.fragment import LANES_PER_ROW, ROWS_PER_THREAD, row_in_warp
from ...pipeline.roles import ROWS_PER_WARP, WARP, WARPS_PER_WARPGROUP
from ..wgmma import ROWS
from .config import HALVES

_BARRIER = 1  # barrier 0 is the CTA barrier


@dataclass(frozen=True)
class RowPairs(Constant):
    """Two float32 for each row and warpgroup, in shared memory. Four threads share a row; one of them stores."""

    pointer: cute.Pointer

    def load(self, half: int, warp: Int32) -> list[list[Float32]]:
        return [load_floats(self.at(half, warp, r), 2) for r in range(ROWS_PER_THREAD)]

    def at(self, half: int, warp: Int32, r: int) -> cute.Pointer:
        return (self.pointer + 2 * (half * ROWS + warp * ROWS_PER_WARP + row_in_warp(r))).align(8)


@cute.jit
def store_pairs(pairs: RowPairs, half: cutlass.Constexpr[int], warp: Int32, values: list[tuple[Float32, Float32]]):
    if cute.arch.lane_idx() % LANES_PER_ROW == 0:
        for r in cutlass.range_constexpr(ROWS_PER_THREAD):
            store_vec(pairs.at(half, warp, r), [bits(x) for x in values[r]])


def both_sync() -> None:
    """Sync the threads of both warpgroups."""
    cute.arch.barrier(barrier_id=_BARRIER, number_of_threads=HALVES * WARPS_PER_WARPGROUP * WARP)
