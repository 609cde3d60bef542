"""Load K and V tiles of 8 or 4 bits from global memory and upconvert them to 16 bits in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..core.bytes import scaled
from ..core.stored import Stored
from ..core.vec_io import as_float, load_vec
from ..runtime import scaled_rows
from .loader import TileCopy, plain_copy

_VECTOR = 8  # elements per thread and load: 16 bytes of the 16-bit tile

RowPointers = tuple[cute.Pointer, cute.Pointer | None]
"""First bytes of a row and of its scales."""


@dataclass(frozen=True)
class ConvertingCopy(TileCopy):
    """`TileCopy` with a source of 8 or 4 bits. Rows and columns out of bounds become zeros, but their addresses must be
    readable. scales: the `row` function of `load_rows` of the scales, if there are any."""

    stored: Stored
    scales: Callable[[Int32], tuple[cute.Pointer, Boolean]] | None

    def load_rows(self, row: Callable[[Int32], tuple[cute.Pointer, Boolean]], target: cute.Tensor) -> None:
        smem = self.copy.get_slice(self.thread).partition_D(target)
        coords, coords0 = self._coordinates()
        rows, chunks = cute.size(smem, mode=[1]), cute.size(smem, mode=[2])
        # All loads come before the first conversion, so that their latencies overlap.
        loaded = []
        for m in range(rows):
            address, exists = row(coords[0, m, 0][0])
            scales = None if self.scales is None else self.scales(coords[0, m, 0][0])[0]
            for k in range(chunks):
                column = coords[0, 0, k][1]
                in_bounds = column < self.columns
                words = self._load((address, scales), Int32(column), in_bounds, coords0[0, 0, k][1])
                loaded.append([Int32(cutlass.select_(exists & in_bounds, x, Int32(0))) for x in words])
        store = plain_copy(self.stored.dtype)
        for i, words in enumerate(loaded):
            registers = cute.make_fragment_like(smem[None, 0, 0])
            pairs_16bit = cute.recast_tensor(registers, Int32)
            for j, pair in enumerate(self._converted(words)):
                pairs_16bit[j] = pair
            cute.copy(store, registers, smem[None, i // chunks, i % chunks])

    def _load(self, row: RowPointers, column: Int32, in_bounds: Boolean, chunk_column: int) -> list[Int32]:
        """Load what eight elements of a row from `column` on are made of. chunk_column: that of the first thread."""
        return self.stored.load(*row, _inside(in_bounds, column), _VECTOR)

    def _converted(self, words: list[Int32]) -> list[Int32]:
        """Return the eight elements, from zeros if they do not exist."""
        return self.stored.operands(words)


@dataclass(frozen=True)
class ScaledRowsCopy(ConvertingCopy):
    """`ConvertingCopy` of `scaled_rows`. first: column of the row at which the tile begins, a multiple of 64."""

    first: Int32 | int

    def _load(self, row: RowPointers, column: Int32, in_bounds: Boolean, chunk_column: int) -> list[Int32]:
        address, _ = row
        if isinstance(self.first, int) and self.first + chunk_column >= scaled_rows.LATENT:
            byte = scaled_rows.ROTATED + 2 * (self.first + column - scaled_rows.LATENT)
            return load_vec(address + _inside(in_bounds, byte), _VECTOR // 2)
        column = self.first + column
        factor = scaled_rows.FACTORS + 4 * (column // scaled_rows.TILE)
        words = load_vec(address + _inside(in_bounds, column), _VECTOR // 4)
        return [*words, *load_vec(address + _inside(in_bounds, factor), 1)]

    def _converted(self, words: list[Int32]) -> list[Int32]:
        if len(words) == _VECTOR // 2:
            return words
        *codes, factor = words
        return [pair for x in codes for pair in scaled(x, as_float(factor), has_cvt=False)]


def _inside(in_bounds: Boolean, offset: Int32) -> Int32:
    return Int32(cutlass.select_(in_bounds, Int32(offset), Int32(0)))
