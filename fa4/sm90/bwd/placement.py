"""Layout of a block's dQ sum: the order in which the threads of the main kernel hold dQ.

Four elements of each thread of a warpgroup are contiguous, then the next four. Element i of a thread is column i % 2 of
its pair in the i / 4-th eight columns, in row i / 2 % 2 of its two rows; see `fragment`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Int32

from ...bwd.blocks import Placement
from ..wgmma import ROWS

WARPGROUP = 128  # threads
CONSUMERS = 2  # warpgroups


def fragment_offset(row: Int32 | int, column: Int32 | int) -> Int32 | int:
    """Return the offset of an accumulator element from the warpgroup's first element."""
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    return column // 8 * (4 * WARPGROUP) + thread * 4 + row // 8 % 2 * 2 + column % 2


@dataclass(frozen=True, slots=True)
class ByColumns(Placement):
    """dQ^T: a consumer has panels of 64 columns as rows, and the queries of the block as columns. An odd panel is last
    in each consumer's share, with half of the queries."""

    rows: ClassVar[int] = 2

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        panel, of_panel, each = first // ROWS, ROWS * self.tile_m, self.columns // ROWS // CONSUMERS
        if panel < CONSUMERS * each:
            consumer, at = panel // each, panel % each
        else:
            half = self.tile_m // CONSUMERS
            consumer, at, row = row // half, each, row % half
        return consumer * (self.elements // CONSUMERS) + at * of_panel + fragment_offset(within, row)


@dataclass(frozen=True, slots=True)
class ByQueries(Placement):
    """dQ: a consumer has 64 queries with all columns."""

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        return row // ROWS * (ROWS * self.columns) + fragment_offset(row % ROWS, first + within)
