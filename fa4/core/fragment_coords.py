"""Coordinates of a thread's fragment of a tile of scores, for any instruction's layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .constant import Constant


@dataclass(frozen=True)
class FragmentCoords(Constant):
    """A thread's fragment: rows at arbitrary coordinates, and `count` columns that all rows share.

    rows: coordinate of each fragment row. first: coordinate of column 0; the others follow at compile-time `offsets`,
    `run` neighbours per `period`, a power of two. grouped: (columns, period), if these runs fill only a part of a
    larger period, also a power of two. cols_are_keys: rows are query rows and columns are keys; else rows are keys and
    columns are query rows.
    """

    rows: tuple[Int32, ...]
    first: Int32
    count: int
    cols_are_keys: bool = True
    run: int = 2
    period: int = 8
    grouped: tuple[int, int] | None = None

    @property
    def offsets(self) -> list[int]:
        columns, period = self.grouped or (max(self.count, 1), 0)
        within = [i // self.run * self.period + i % self.run for i in range(columns)]
        return [i // columns * period + within[i % columns] for i in range(self.count)]

    def below(self, limit: Int32) -> Int32:
        """Number of offsets less than `limit`. It is 0 or less if none is, and may exceed `count` if all are."""
        if self.grouped is not None:
            columns, period = self.grouped
            groups = (limit >> (period.bit_length() - 1)) * columns
            return groups + cutlass.min(self._below_in_runs(limit & (period - 1)), columns)
        return self._below_in_runs(limit)

    def _below_in_runs(self, limit: Int32) -> Int32:
        if self.run == self.period:
            return limit
        whole = (limit >> (self.period.bit_length() - 1)) * self.run
        return whole + cutlass.min(limit & (self.period - 1), self.run)


def reduce_row(value: Float32, combine: Callable[[Float32, Float32], Float32]) -> Float32:
    """Combine a value over the four threads that share a row of an mma.sync or wgmma accumulator."""
    for offset in (2, 1):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=offset, mask=-1, mask_and_clamp=31))
    return value


def fragment_rows(x: cute.Tensor) -> list[list]:
    """Return the values of a register tensor (rows, columns) as a list of rows."""
    return [[x[r, c] for c in range(cute.size(x, mode=[1]))] for r in range(cute.size(x, mode=[0]))]


def store_fragment_rows(x: cute.Tensor, rows: list[list]) -> None:
    """Store a list of rows to a register tensor (rows, columns)."""
    for r, row in enumerate(rows):
        for c, value in enumerate(row):
            x[r, c] = value
