"""Tiles of 8-bit numbers in global memory, as 16-bit numbers in shared memory: converted on the way in."""

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

_BYTES = 8  # numbers that a thread takes at a time: 16 bytes of the tile


@dataclass(frozen=True)
class ConvertingCopy(TileCopy):
    """A `TileCopy` whose source has bytes. Rows and columns that do not exist become zeros; their addresses must be
    some that may be read."""

    source: torch.dtype
    dtype: type[cutlass.Numeric]

    def load_rows(self, row: Callable[[Int32], tuple[cute.Pointer, Boolean]], target: cute.Tensor) -> None:
        smem = self.copy.get_slice(self.thread).partition_D(target)
        own, _ = self._coordinates()
        rows, chunks = cute.size(smem, mode=[1]), cute.size(smem, mode=[2])
        # All loads before the first conversion: their latencies overlap.
        loaded = []
        for m in range(rows):
            address, exists = row(own[0, m, 0][0])
            for k in range(chunks):
                column = own[0, 0, k][1]
                is_there = column < self.columns
                first = cutlass.select_(is_there, Int32(column), Int32(0))
                words = load_vec(address + first, _BYTES // 4)
                loaded.append([Int32(cutlass.select_(exists & is_there, word, Int32(0))) for word in words])
        store = plain_copy(self.dtype)
        for i, words in enumerate(loaded):
            registers = cute.make_fragment_like(smem[None, 0, 0])
            halves = cute.recast_tensor(registers, Int32)
            for j, word in enumerate(words):
                for k, pair in enumerate(upconverted(word, self.source, self.dtype, has_cvt=False)):
                    halves[2 * j + k] = pair
            cute.copy(store, registers, smem[None, i // chunks, i % chunks])
