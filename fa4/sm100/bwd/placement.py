"""Layouts of the dQ accumulator of a block: the order in which the role `reduce` reads tensor memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Int32

from ...bwd.blocks import Placement

LANES = 128  # TMEM lanes: keys of transposed scores, queries (or columns) of dQ
CHUNK = 32  # TMEM columns of dQ per bulk addition; head dims are padded to whole chunks
CHUNK_FLOATS = LANES * CHUNK


@dataclass(frozen=True, slots=True)
class Chunks(Placement):
    """A lane is a query: chunks of shape (CHUNK / 4, lane, 4). Each CTA of a pair has half of the queries; its lanes 64
    to 127 hold the second half of the columns of lanes 0 to 63."""

    ctas: int

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        lane, chunk = row, first // CHUNK
        if self.ctas == 2:
            queries, chunks = self.tile_m // 2, self.columns // 2 // CHUNK
            lane = row % queries + chunk // chunks * queries
            chunk = row // queries * chunks + chunk % chunks
        return chunk * CHUNK_FLOATS + within // 4 * (4 * LANES) + 4 * lane + within % 4


@dataclass(frozen=True, slots=True)
class Columns(Placement):
    """A lane is a column of Q: shape (query / 4, column, 4), first LANES columns, then the others."""

    rows: ClassVar[int] = 4

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        begin, width = 0, LANES
        if first >= LANES:
            begin, first, width = self.tile_m * LANES, first - LANES, self.columns - LANES
        return begin + (row // 4 * width + first + within) * 4 + row % 4
