"""Prefetch of K and V of 8 or 4 bits from global memory to registers, one block ahead."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...core.constant import Constant
from ...pipeline.upconvert import CHUNK, COLUMNS, Upconversion
from ..launch import ForwardContext
from .key_rows import KeyRows
from .work import Work


@dataclass(frozen=True)
class Fetch(Constant):
    """A thread's `Upconversion.shares` of k or v, one block ahead. scales: those of x, if it has any. packed: registers
    of one block."""

    x: cute.Tensor
    scales: cute.Tensor | None
    columns: cutlass.Constexpr[int]
    upconversion: Upconversion
    rows: KeyRows
    packed: cute.Tensor

    @staticmethod
    def of(context: ForwardContext, name: str, work: Work, upconversion: Upconversion) -> Fetch:
        args, stored = context.args, upconversion.stored
        tile_rows = tuple(upconversion.row(group) for group in range(upconversion.groups))
        packed = cute.make_rmem_tensor(stored.registers(CHUNK) * len(upconversion.shares), Int32)
        scales = args.cache.scales(name) if stored.has_scales else None
        columns = getattr(context.cfg, f"{name}_tile").columns
        rows = KeyRows.of(context, work, tile_rows)
        return Fetch(getattr(args, name), scales, columns, upconversion, rows, packed)

    def prefetch(self, block: Int32, following: Int32) -> None:
        """Start to load the block of the last `rows.load_pages`, and look up the following block. Rows and columns
        outside the data are replaced by valid ones."""
        stored, groups = self.upconversion.stored, range(self.upconversion.groups)
        sources = [self.rows.source(self.x, block, i)[0] for i in groups]
        scales = [None if self.scales is None else self.rows.source(self.scales, block, i)[0] for i in groups]
        count = stored.registers(CHUNK)
        for i, (group, panel) in enumerate(self.upconversion.shares):
            column = panel * COLUMNS + self.upconversion.column()
            if self.columns % COLUMNS:
                column = cutlass.min(column, self.columns - CHUNK)
            for j, register in enumerate(stored.load(sources[group], scales[group], column, CHUNK)):
                self.packed[count * i + j] = register
        self.rows.load_pages(following)

    def loaded(self) -> list[list[Int32]]:
        """Return the prefetched registers, one list per share."""
        count = self.upconversion.stored.registers(CHUNK)
        return [[self.packed[count * i + j] for j in range(count)] for i in range(len(self.upconversion.shares))]
