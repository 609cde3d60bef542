"""Load 8-bit K and V tiles from global memory and upconvert them to 16 bits in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Int32

from ..core.bytes import upconverted
from ..core.vec_io import load_vec
from .loader import TileCopy, plain_copy

_VECTOR = 8  # 8-bit elements per thread and load: 16 bytes of the 16-bit tile


@dataclass(frozen=True)
class ConvertingCopy(TileCopy):
    """`TileCopy` with an 8-bit source. Rows and columns out of bounds become zeros, but their addresses must be
    readable."""

    source: torch.dtype
    dtype: type[cutlass.Numeric]

    def load_rows(self, row: Callable[[Int32], tuple[cute.Pointer, Boolean]], target: cute.Tensor) -> None:
        smem = self.copy.get_slice(self.thread).partition_D(target)
        coords, _ = self._coordinates()
        rows, chunks = cute.size(smem, mode=[1]), cute.size(smem, mode=[2])
        # All loads come before the first conversion, so that their latencies overlap.
        loaded = []
        for m in range(rows):
            address, exists = row(coords[0, m, 0][0])
            for k in range(chunks):
                column = coords[0, 0, k][1]
                in_bounds = column < self.columns
                first = cutlass.select_(in_bounds, Int32(column), Int32(0))
                packed = load_vec(address + first, _VECTOR // 4)
                loaded.append([Int32(cutlass.select_(exists & in_bounds, x, Int32(0))) for x in packed])
        store = plain_copy(self.dtype)
        for i, packed in enumerate(loaded):
            registers = cute.make_fragment_like(smem[None, 0, 0])
            pairs_16bit = cute.recast_tensor(registers, Int32)
            for j, x in enumerate(packed):
                for k, pair in enumerate(upconverted(x, self.source, self.dtype, has_cvt=False)):
                    pairs_16bit[2 * j + k] = pair
            cute.copy(store, registers, smem[None, i // chunks, i % chunks])
