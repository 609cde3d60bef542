"""Conversion of values of 8 and 4 bits to 16-bit floats for the matrix unit: exact, except `scaled`.

e4m3: sm_89 and newer convert two values at a time to float16, and from there through float32 to bfloat16. Any chip from
sm_80 on can use arithmetic. For bits s eeee mmm, the 16-bit float with the same exponent and mantissa fields is the
value times a power of two: 2^-8 in float16, 2^-120 in bfloat16 (the difference of the biases), also for e = 0. One
exact multiplication corrects it. The only NaN, 0x7f, gets an exponent of all ones.

int8: in 1024 as float16, the last mantissa bit has the value 1. Its last byte is replaced by the value plus 128: the
byte with its sign bit flipped. 1152 less is the value. In 128 as bfloat16, too, the last mantissa bit has the value 1,
but there are seven of them. With sign bit s and the other seven bits m, the value is m - 128 s. The last bits of 128
are replaced by m or by 128 s; the difference of both floats is the value.

e2m1, times an e4m3 scale (NVFP4): for bits s ee m, the float with these exponent and mantissa fields is the value times
2^-14 in float16, 2^-126 in bfloat16, also for ee = 0. It is multiplied by the scale times 2^7 or 2^119, which no scale
moves out of range. So the product is value * scale / `UNIT`, of six significant bits, exact in both types. Blackwell
converts two values at a time to float16, which the scale / `UNIT` multiplies.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm

UNIT = 2.0**7  # by which `e2m1_times` divides

_UNIT = 0x43004300  # a pair of bfloat16: 128


def upconverted(word: Int32, source: torch.dtype, dtype: type[cutlass.Numeric], has_cvt: bool = True) -> list[Int32]:
    """Convert four 8-bit values to two words of two `dtype` values. has_cvt: the chip has a conversion of e4m3."""
    if source == torch.int8 and dtype is cutlass.Float16:
        return _int8_to_float16(word)
    if source == torch.int8:
        return [_int8_to_bfloat16(_spread(word, half)) for half in range(2)]
    if not has_cvt:
        return [_e4m3_to_float(_spread(word, half), dtype) for half in range(2)]
    pairs = _cvt_e4m3(word)
    return list(pairs) if dtype is cutlass.Float16 else [_to_bfloat16(pair) for pair in pairs]


def scaled(word: Int32, factor: Float32, has_cvt: bool = True) -> list[Int32]:
    """Convert four e4m3 values, times a factor, to two words of two bfloat16 values."""
    pairs = upconverted(word, torch.float8_e4m3fn, cutlass.Float16, has_cvt)
    return [
        cute.arch.inline_ptx(
            """{
            .reg .b16 low, high;
            .reg .f32 a, b;
            mov.b32 {low, high}, {$r0};
            cvt.f32.f16 a, low;
            cvt.f32.f16 b, high;
            mul.rn.f32 a, a, {$r1};
            mul.rn.f32 b, b, {$r1};
            cvt.rn.bf16x2.f32 {$w0}, b, a;
            }""",
            write_only_types=[Int32],
            read_only_args=[pair, factor],
        )
        for pair in pairs
    ]


def e2m1_times(word: Int32, scale: Int32, dtype: type[cutlass.Numeric], has_cvt: bool) -> list[Int32]:
    """Convert eight e2m1 values to four words of two `dtype` values. scale: from `scale_pair`. has_cvt: the chip has a
    conversion of e2m1 to float16."""
    if dtype is not cutlass.Float16:
        return [_product(pair, scale, dtype) for pair in _e2m1_to_bfloat16(word)]
    if has_cvt:
        return [_product(pair, scale, dtype) for pair in _cvt_e2m1(word)]
    even, pairs = word << 4, list[Int32]()
    for byte in range(4):
        # In both halves a nibble comes to the top: of the even column from `even`, of the odd one from the word.
        nibbles = _permuted(even, word, (4 + byte) * 0x1100 + byte * 0x11)
        pair = ((nibbles & 0x70007000) >> 3) | (nibbles & -0x7FFF8000)
        pairs.append(_product(pair, scale, dtype))
    return pairs


def _e2m1_to_bfloat16(word: Int32) -> list[Int32]:
    """Convert eight e2m1 values, times 2^-126, to four pairs of bfloat16. A nibble is alone in each half of a word. So
    one multiplication puts its sign at the top, and a copy of it, apart from the first, where exponent and significand
    belong: adders do it, beside the logical unit, which takes most of a conversion's time."""
    even, odd = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
    pairs = list[Int32]()
    for byte in range(4):
        # With 8 added, a selector takes the sign of a byte, here 0, eight times.
        nibbles = _permuted(even, odd, 0xC480 + byte * 0x1111)
        pairs.append((nibbles * ((1 << 12) + (1 << 6))) & -0x7E3F7E40)
    return pairs


def scale_pair(byte: Int32, dtype: type[cutlass.Numeric], has_cvt: bool, has_cvt_e2m1: bool) -> Int32:
    """Convert an e4m3 scale to a word of twice what `e2m1_times` multiplies by. has_cvt: the chip has a conversion of
    e4m3."""
    factor = 2.0**119
    if dtype is cutlass.Float16:
        factor = 1 / UNIT if has_cvt_e2m1 else 2.0**7
    if not has_cvt:
        return _times(_e4m3_to_float(byte | (byte << 16), dtype), factor, dtype)
    if dtype is cutlass.Float16:
        return _times(_cvt_e4m3(byte | (byte << 8))[0], factor, dtype)
    return cute.arch.inline_ptx(
        """{
        .reg .b16 code, low, high;
        .reg .b32 pair;
        .reg .f32 value;
        cvt.u16.u32 code, {$r0};
        cvt.rn.f16x2.e4m3x2 pair, code;
        mov.b32 {low, high}, pair;
        cvt.f32.f16 value, low;
        mul.rn.f32 value, value, {$r1};
        cvt.rn.bf16x2.f32 {$w0}, value, value;
        }""",
        write_only_types=[Int32],
        read_only_args=[byte, Float32(factor)],
    )


def _permuted(a: Int32, b: Int32, selector: int) -> Int32:
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector};", write_only_types=[Int32], read_only_args=[a, b]
    )


def _spread(word: Int32, half: int) -> Int32:
    """Return bytes 2 * half and 2 * half + 1 of a word, as the low bytes of its 16-bit halves."""
    byte = (word >> (16 * half)) & 0xFFFF
    return (byte & 0xFF) | ((byte & 0xFF00) << 8)


def _int8_to_float16(word: Int32) -> list[Int32]:
    """Convert four int8 values to two pairs of float16. 0x64 is the upper byte of 1024, 0x6480 is 1152."""
    return list(
        cute.arch.inline_ptx(
            """{
            .reg .b32 flipped, pair, offset;
            mov.b32 offset, 0x64806480;
            xor.b32 flipped, {$r0}, 0x80808080;
            prmt.b32 pair, flipped, 0x64646464, 0x4140;
            sub.f16x2 {$w0}, pair, offset;
            prmt.b32 pair, flipped, 0x64646464, 0x4342;
            sub.f16x2 {$w1}, pair, offset;
            }""",
            write_only_types=[Int32, Int32],
            read_only_args=[word],
        )
    )


def _int8_to_bfloat16(spread: Int32) -> Int32:
    kind = ir.VectorType.get([2], cutlass.BFloat16.mlir_type)
    terms = (llvm.bitcast(kind, (spread & mask | _UNIT).ir_value()) for mask in (0x007F007F, 0x00800080))
    return Int32(llvm.bitcast(Int32.mlir_type, arith.subf(*terms)))


def _e4m3_to_float(spread: Int32, dtype: type[cutlass.Numeric]) -> Int32:
    shift, infinity = (7, 0x7C00) if dtype is cutlass.Float16 else (4, 0x7F80)
    magnitude, sign = spread & 0x007F007F, (spread & 0x00800080) << 8
    is_nan = ((magnitude + 0x00010001) >> 7) & 0x00010001
    scaled = _times(sign | (magnitude << shift), 2.0**8 if dtype is cutlass.Float16 else 2.0**120, dtype)
    return scaled | (is_nan * infinity)


def _times(pair: Int32, factor: float, dtype: type[cutlass.Numeric]) -> Int32:
    """Multiply two packed floats by a number."""
    kind = ir.VectorType.get([2], dtype.mlir_type)
    factors = arith.constant(kind, ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(dtype.mlir_type, factor)))
    return Int32(llvm.bitcast(Int32.mlir_type, arith.mulf(llvm.bitcast(kind, pair.ir_value()), factors)))


def _product(a: Int32, b: Int32, dtype: type[cutlass.Numeric]) -> Int32:
    """Multiply two pairs of packed floats."""
    kind = ir.VectorType.get([2], dtype.mlir_type)
    product = arith.mulf(*(llvm.bitcast(kind, x.ir_value()) for x in (a, b)))
    return Int32(llvm.bitcast(Int32.mlir_type, product))


def _cvt_e4m3(word: Int32) -> tuple[Int32, Int32]:
    """Convert four e4m3 values to two pairs of float16."""
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


def _cvt_e2m1(word: Int32) -> tuple[Int32, ...]:
    """Convert eight e2m1 values to four pairs of float16."""
    return cute.arch.inline_ptx(
        """{
        .reg .b8 b0, b1, b2, b3;
        mov.b32 {b0, b1, b2, b3}, {$r0};
        cvt.rn.f16x2.e2m1x2 {$w0}, b0;
        cvt.rn.f16x2.e2m1x2 {$w1}, b1;
        cvt.rn.f16x2.e2m1x2 {$w2}, b2;
        cvt.rn.f16x2.e2m1x2 {$w3}, b3;
        }""",
        write_only_types=[Int32] * 4,
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
