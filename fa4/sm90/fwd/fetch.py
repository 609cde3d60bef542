"""Prefetch of 8-bit K and V from global memory to registers, one block ahead."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...core.constant import Constant
from ...core.vec_io import load_vec
from ...fwd.device.key_rows import KeyRows
from ...fwd.device.work import Work
from ...pipeline.upconvert import COLUMNS, Upconversion
from .config import Sm90ForwardContext

_VEC = 4  # 32-bit registers per load


@dataclass(frozen=True)
class Fetch(Constant):
    """A thread's `Upconversion.shares` of the bytes of k or v, one block ahead. packed: registers of one block."""

    x: cute.Tensor
    columns: cutlass.Constexpr[int]
    upconversion: Upconversion
    rows: KeyRows
    packed: cute.Tensor

    @staticmethod
    def of(context: Sm90ForwardContext, name: str, work: Work, upconversion: Upconversion) -> Fetch:
        tile_rows = tuple(upconversion.row(group) for group in range(upconversion.groups))
        packed = cute.make_rmem_tensor(_VEC * len(upconversion.shares), Int32)
        columns = getattr(context.cfg, f"{name}_tile").columns
        return Fetch(getattr(context.args, name), columns, upconversion, KeyRows.of(context, work, tile_rows), packed)

    def prefetch(self, block: Int32, following: Int32) -> None:
        """Start to load the block of the last `rows.load_pages`, and look up the following block. Rows and columns
        outside the data are replaced by valid ones."""
        sources = [self.rows.source(self.x, block, i)[0] for i in range(self.upconversion.groups)]
        for i, (group, panel) in enumerate(self.upconversion.shares):
            column = panel * COLUMNS + self.upconversion.column()
            if self.columns % COLUMNS:
                column = cutlass.min(column, self.columns - 4 * _VEC)
            for j, pack_i in enumerate(load_vec(sources[group] + column, _VEC)):
                self.packed[_VEC * i + j] = pack_i
        self.rows.load_pages(following)

    def vectors(self) -> list[list[Int32]]:
        """Return the prefetched registers, one list per share."""
        return [[self.packed[_VEC * i + j] for j in range(_VEC)] for i in range(len(self.upconversion.shares))]
