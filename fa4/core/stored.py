"""Columns of a cache row on their way from memory to operands: what a thread loads, and what it makes of it.

Formats (`spec.CacheSpec.dtype`): e4m3 and int8 become floats of the same value; their factors multiply scores and O.
NVFP4 (`runtime.nvfp4`) has a scale for each 16 columns, in a tensor of its own. An operand is then number * scale /
`bytes.UNIT`, exactly, and the unit multiplies scores and O.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from ..runtime import nvfp4
from .bytes import e2m1_times, scale_pair, upconverted
from .constant import Constant
from .vec_io import load_vec


@dataclass(frozen=True)
class Stored(Constant):
    """Format of stored numbers and of their operands. source: dtype in the cache; dtype: that of the operand. has_cvt,
    has_cvt_e2m1: the chip has conversions of e4m3 and of e2m1."""

    source: cutlass.Constexpr[torch.dtype]
    dtype: cutlass.Constexpr[type[cutlass.Numeric]]
    has_cvt: cutlass.Constexpr[bool] = True
    has_cvt_e2m1: cutlass.Constexpr[bool] = False

    @property
    def has_scales(self) -> bool:
        """Whether a row's scales are in a tensor of their own."""
        return self.source is nvfp4.DTYPE

    def words(self, columns: int) -> int:
        """Return the 32-bit words that columns take."""
        return columns * (4 if self.has_scales else 8) // 32

    def registers(self, columns: int) -> int:
        """Return the 32-bit registers of `load`."""
        return self.words(columns) + self.has_scales

    def load(self, row: cute.Pointer, scales: cute.Pointer | None, column: Int32, columns: int) -> list[Int32]:
        """Load `columns` columns, a multiple of 8 with one scale, from `column` on. row, scales: first bytes of the row
        and of its scales."""
        if scales is None:
            return load_vec(row + column, self.words(columns))
        words = load_vec(row + column // nvfp4.PER_BYTE, self.words(columns))
        scale = cute.make_tensor(scales + column // nvfp4.COLUMNS, cute.make_layout(1))[0]
        return [*words, Int32(scale) & 0xFF]

    def operands(self, loaded: list[Int32]) -> list[Int32]:
        """Convert what `load` returned to words of two operands."""
        if not self.has_scales:
            return [x for word in loaded for x in upconverted(word, self.source, self.dtype, self.has_cvt)]
        *words, scale = loaded
        pair = scale_pair(scale, self.dtype, self.has_cvt, self.has_cvt_e2m1)
        return [x for word in words for x in e2m1_times(word, pair, self.dtype, self.has_cvt_e2m1)]
