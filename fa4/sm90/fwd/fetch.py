"""Keys and values of 8 bits in plain memory on the way to registers, a block ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...core.constant import Constant
from ...core.vec_io import load_vec
from ...fwd.key_rows import KeyRows
from ...pipeline.upconvert import COLUMNS, Upconversion

_WORDS = 4  # that a thread loads at a time


@dataclass(frozen=True)
class Fetch(Constant):
    """One thread's `Upconversion.shares` of the bytes of k or v, a block ahead. held: the words of one block."""

    x: cute.Tensor
    columns: cutlass.Constexpr[int]
    upconversion: Upconversion
    rows: KeyRows
    held: cute.Tensor

    @staticmethod
    def of(context: Any, name: str, work: Any, upconversion: Upconversion) -> Fetch:
        own = tuple(upconversion.row(group) for group in range(upconversion.groups))
        held = cute.make_rmem_tensor(_WORDS * len(upconversion.shares), Int32)
        columns = getattr(context.cfg, f"{name}_tile").columns
        return Fetch(getattr(context.args, name), columns, upconversion, KeyRows.of(context, work, own), held)

    def look_up(self, block: Int32) -> None:
        """Before the first `ask`."""
        self.rows.look_up(block)

    def ask(self, block: Int32, following: Int32) -> None:
        """Start to load a block's bytes, the one last looked up, and look up the following one. Rows that are no keys
        are some that are, and so are columns."""
        sources = [self.rows.source(self.x, block, i)[0] for i in range(self.upconversion.groups)]
        for i, (group, panel) in enumerate(self.upconversion.shares):
            column = panel * COLUMNS + self.upconversion.column()
            if self.columns % COLUMNS:
                column = cutlass.min(column, self.columns - 4 * _WORDS)
            for j, word in enumerate(load_vec(sources[group] + column, _WORDS)):
                self.held[_WORDS * i + j] = word
        self.look_up(following)

    def words(self) -> list[list[Int32]]:
        """What was asked for."""
        return [[self.held[_WORDS * i + j] for j in range(_WORDS)] for i in range(len(self.upconversion.shares))]
