"""Where a thread's elements of a tile of scores lie, whichever instruction laid them out."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .constant import Constant


@dataclass(frozen=True)
class FragmentCoords(Constant):
    """A thread's elements are lines, each at a place of its own, and the same `count` places across every line.

    lines: the query row (the key) of each line. first: the key (the query row) of the first element across; the others
    follow at compile-time `offsets`, `run` neighbours of every `period`, a power of two. keys_across: lines are query
    rows and keys run across them; else it is the other way about.
    """

    lines: tuple[Int32, ...]
    first: Int32
    count: int
    keys_across: bool = True
    run: int = 2
    period: int = 8

    @property
    def offsets(self) -> list[int]:
        return [i // self.run * self.period + i % self.run for i in range(self.count)]

    def below(self, limit: Int32) -> Int32:
        """How many offsets are less than `limit`; 0 or less if none is, and perhaps more than `count` if all are."""
        if self.run == self.period:
            return limit
        whole = (limit >> (self.period.bit_length() - 1)) * self.run
        return whole + cutlass.min(limit & (self.period - 1), self.run)


def lines_of(x: cute.Tensor) -> list[list]:
    """The elements of a register tensor (lines, across)."""
    return [[x[r, c] for c in range(cute.size(x, mode=[1]))] for r in range(cute.size(x, mode=[0]))]


def store_lines(x: cute.Tensor, lines: list[list]) -> None:
    """Put them back."""
    for r, line in enumerate(lines):
        for c, value in enumerate(line):
            x[r, c] = value
