"""Where the role `reduce` adds up a block's dQ: in the order in which tensor memory gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass import Int32

from ...bwd.blocks import Placement

LANES = 128  # of tensor memory: the keys of transposed scores, the queries (or columns) of dQ
CHUNK = 32  # tensor-memory columns of dQ that one bulk addition takes; head dims are padded to whole chunks
CHUNK_FLOATS = LANES * CHUNK


@dataclass(frozen=True, slots=True)
class Chunks(Placement):
    """A lane is a query: chunks of (CHUNK / 4, lane, 4) columns. In a pair of CTAs each has half of the queries, and
    its lanes 64 to 127 the second half of the columns of lanes 0 to 63."""

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
    """A lane is a column of Q: (query / 4, column, 4 queries), the first LANES columns and then the rest."""

    rows: ClassVar[int] = 4

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        begin, width = 0, LANES
        if first >= LANES:
            begin, first, width = self.tile_m * LANES, first - LANES, self.columns - LANES
        return begin + (row // 4 * width + first + within) * 4 + row % 4
