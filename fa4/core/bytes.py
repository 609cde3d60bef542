"""Numbers of 8 bits, those of `spec.BYTES`, as numbers of 16 bits that products take: exactly.

e4m3: a chip of sm_89 or newer converts two at a time to float16; to bfloat16 they go on by way of float32. Any chip
since sm_80 does it by arithmetic: with bits s eeee mmm, the 16-bit float with the same exponent and mantissa fields is
the number times a power of two, 2^-8 in float16 and 2^-120 in bfloat16 (the difference of the biases), also where e is
0; one exact multiplication repairs it. 0x7f, the one NaN, gets an exponent of ones.

int8: with s the sign bit and m the other seven, the number is m - 128 s. A 16-bit float whose last mantissa bit is
worth 1, 128 in bfloat16 and 1024 in float16, takes m or s where its last bits are; their difference is the number.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm

_UNIT = {cutlass.Float16: 0x64006400, cutlass.BFloat16: 0x43004300}  # pairs of 1024 and of 128


def upconverted(word: Int32, source: torch.dtype, dtype: type[cutlass.Numeric], has_cvt: bool = True) -> list[Int32]:
    """Four numbers as two words of two numbers of `dtype`. has_cvt: on a chip that converts e4m3."""
    if source == torch.int8:
        return [_of_int8(_spread(word, place), dtype) for place in range(2)]
    if not has_cvt:
        return [_of_e4m3(_spread(word, place), dtype) for place in range(2)]
    pairs = _converted(word)
    return list(pairs) if dtype is cutlass.Float16 else [_to_bfloat16(pair) for pair in pairs]


def _spread(word: Int32, place: int) -> Int32:
    """Bytes 2 * place and 2 * place + 1 of a word, as the low bytes of its halves."""
    byte = (word >> (16 * place)) & 0xFFFF
    return (byte & 0xFF) | ((byte & 0xFF00) << 8)


def _of_int8(spread: Int32, dtype: type[cutlass.Numeric]) -> Int32:
    kind, unit = ir.VectorType.get([2], dtype.mlir_type), _UNIT[dtype]
    terms = (llvm.bitcast(kind, (spread & mask | unit).ir_value()) for mask in (0x007F007F, 0x00800080))
    return Int32(llvm.bitcast(Int32.mlir_type, arith.subf(*terms)))


def _of_e4m3(spread: Int32, dtype: type[cutlass.Numeric]) -> Int32:
    shift, infinity = (7, 0x7C00) if dtype is cutlass.Float16 else (4, 0x7F80)
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


def _converted(word: Int32) -> tuple[Int32, Int32]:
    """Four of e4m3 as pairs of float16."""
    return cute.arch.inline_ptx(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, {$r0};
        cvt.rn.f16x2.e4m3x2 {$w0}, low;
        cvt.rn.f16x2.e4m3x2 {$w1}, high;
        }""",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )


def _to_bfloat16(pair: Int32) -> Int32:
    return cute.arch.inline_ptx(
        """{
        .reg .b16 low, high;
        .reg .f32 a, b;
        mov.b32 {low, high}, {$r0};
        cvt.f32.f16 a, low;
        cvt.f32.f16 b, high;
        cvt.rn.bf16x2.f32 {$w0}, b, a;
        }""",
        write_only_types=[Int32],
        read_only_args=[pair],
    )
