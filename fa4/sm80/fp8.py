"""Tiles of 8-bit numbers (e4m3) in global memory, as 16-bit numbers in shared memory: converted on the way in.

By arithmetic that every chip since sm_80 has. With bits s eeee mmm, the 16-bit float with the same exponent and
mantissa fields is the number times a power of two, 2^-8 in float16 and 2^-120 in bfloat16 (the difference of the
biases), also where e is 0; one exact multiplication repairs it. 0x7f, the one NaN, gets an exponent of ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm

from ..core.words import load_words
from .loader import TileCopy, plain_copy

_BYTES = 8  # numbers that a thread takes at a time: 16 bytes of the tile


@dataclass(frozen=True)
class ConvertingCopy(TileCopy):
    """A `TileCopy` whose source has bytes. Rows and columns that do not exist become zeros; their addresses must be
    some that may be read."""

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
                words = load_words(address + first, _BYTES // 4)
                loaded.append([Int32(cutlass.select_(exists & is_there, word, Int32(0))) for word in words])
        store = plain_copy(self.dtype)
        for i, words in enumerate(loaded):
            registers = cute.make_fragment_like(smem[None, 0, 0])
            halves = cute.recast_tensor(registers, Int32)
            for j, word in enumerate(words):
                for k in range(2):
                    halves[2 * j + k] = _pair(word, k, self.dtype)
            cute.copy(store, registers, smem[None, i // chunks, i % chunks])


def _pair(word: Int32, place: int, dtype: type[cutlass.Numeric]) -> Int32:
    """Bytes 2 * place and 2 * place + 1 of a word as two 16-bit floats."""
    shift, infinity = (7, 0x7C00) if dtype is cutlass.Float16 else (4, 0x7F80)
    byte = (word >> (16 * place)) & 0xFFFF
    spread = (byte & 0xFF) | ((byte & 0xFF00) << 8)
    magnitude, sign = spread & 0x007F007F, (spread & 0x00800080) << 8
    is_nan = ((magnitude + 0x00010001) >> 7) & 0x00010001
    scaled = _times_power(sign | (magnitude << shift), dtype)
    return scaled | (is_nan * infinity)


def _times_power(pair: Int32, dtype: type[cutlass.Numeric]) -> Int32:
    """Two floats times 2^8 (float16) or 2^120 (bfloat16)."""
    kind = ir.VectorType.get([2], dtype.mlir_type)
    power = ir.FloatAttr.get(dtype.mlir_type, 2.0**8 if dtype is cutlass.Float16 else 2.0**120)
    factors = arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, power))
    product = arith.mulf(llvm.bitcast(kind, pair.ir_value()), factors)
    return Int32(llvm.bitcast(Int32.mlir_type, product))
