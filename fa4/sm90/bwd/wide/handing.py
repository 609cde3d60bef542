"""What both warpgroups walk through together, and how P gets from one to the other through shared memory.

P lies there as float16, in the order in which threads hold it: eight numbers of every thread, then the next eight.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from ....core.words import load_halves, store_words
from ....pipeline.cursor import Cursor
from ..placement import WARPGROUP
from ..pointwise import rounded


class Cursors(NamedTuple):
    """A step's place in the channels that each step of a warpgroup takes one turn of."""

    q: Cursor
    do: Cursor
    p: Cursor

    def next(self) -> Cursors:
        """Those of the step that follows."""
        return Cursors(*(cursor.next() for cursor in self))


def hand_over(context, stage: Int32, p: list[Float32]) -> None:
    """Put this thread's P there."""
    words = rounded(p, Float16)
    for i, place in enumerate(_places(context, stage, len(p))):
        store_words(place, words[4 * i : 4 * i + 4])


def handed_over(context, stage: Int32, count: int) -> list[Float32]:
    """This thread's P, from there."""
    return [x for place in _places(context, stage, count) for x in load_halves(place, Float16)]


def _places(context, stage: Int32, count: int) -> list[cute.Pointer]:
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    first = context.smem.pointer("P", Float16) + stage * (context.cfg.p_bytes // 2) + 8 * thread
    return [first + i * WARPGROUP for i in range(0, count, 8)]
