"""GQA packing: the query heads that share a key/value head become neighbouring rows of one tile.

With `group` heads packed, tile row r is query r // group of head r % group, so that a short query sequence fills the
tile and each key is loaded once for the whole group. Without packing group is 1 and rows are queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32


@dataclass(frozen=True)
class PackedRows:
    """The rows of one (sequence, key/value head): `x` and `lse` views start at the first head of the group.

    first_head: the head that row 0 belongs to. queries: how many query positions exist.
    """

    first_head: Int32
    queries: Int32
    group: cutlass.Constexpr[int]

    def query(self, row: Int32) -> Int32:
        return row // self.group if self.group > 1 else row

    def head(self, row: Int32) -> Int32:
        return self.first_head + row % self.group if self.group > 1 else self.first_head

    def exists(self, row: Int32) -> Boolean:
        return self.query(row) < self.queries

    def address(self, x: cute.Tensor, row: Int32) -> tuple[cute.Pointer, Boolean]:
        """Where the row starts in a (rows, heads, dim) tensor of one sequence, and whether it exists."""
        offset = cute.crd2idx((self.query(row), self.head(row), 0), x.layout)
        return x.iterator + offset, self.exists(row)
