"""2^x for softmax: on the special-function unit, or on the FMA units for a share of the elements.

The polynomial path splits x = n + f. A round-down addition of 1.5 * 2^23 gives n = floor(x), a minimax polynomial gives
2^f on [0, 1), and an integer addition puts n into the exponent field. Packed FMA handles two elements at a time.

For P in e4m3, whose numbers are 6 to 12 percent apart, 2^f is the line 1 + f. A float's bits are that line already:
n in the exponent field, f in the significand. So x, in fixed-point notation with n + 15 before the point, is a float16
number. It comes from one multiply-add and one conversion: a subnormal float16 number has an integer as its bits.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm

from ..core.vec_io import floats_of_f16x2
from ..runtime.spec import LINE_SHIFT

# Coefficients, constant term first: the minimax polynomial (relative error) on [0, 1] with value 1 at 0. The error in
# fp32 is 1.45e-7, as exact as the special-function unit. With degree 3 it would be 8.57e-5: below half an ulp of
# bfloat16, which is enough for P, but not for the row sum and the log-sum-exp.
COEFFICIENTS = (
    1.0, 0.6931512951850891, 0.24016444385051727, 0.05579991266131401, 0.009017030708491802, 0.0018671300495043397,
)  # fmt: skip
SMALLEST = -127.0  # the smallest exponent that the shift can form; 2^-127 becomes 0 when P is rounded to 16 bits
_FLOOR = 12582912.0  # 1.5 * 2^23: adding it leaves the integer part in the low mantissa bits


def exp2_mufu(x: Float32) -> Float32:
    """2^x on the special-function unit (relative error 2^-22, subnormals flushed)."""
    return cute.math.exp2(x, fastmath=True)


def exp2_polynomial(x: Float32, y: Float32) -> tuple[Float32, Float32]:
    """(2^x, 2^y) on the FMA units, for x, y <= 127; values below -127 are clamped to -127."""
    xy = (cute.arch.fmax(x, Float32(SMALLEST)), cute.arch.fmax(y, Float32(SMALLEST)))
    biased = cute.arch.add_packed_f32x2(xy, (Float32(_FLOOR),) * 2, rnd="rm")
    floor = cute.arch.add_packed_f32x2(biased, (Float32(-_FLOOR),) * 2)
    fraction = cute.arch.sub_packed_f32x2(xy, floor)
    *rest, last = COEFFICIENTS
    power = (Float32(last),) * 2
    for coefficient in reversed(rest):
        power = cute.arch.fma_packed_f32x2(power, fraction, (Float32(coefficient),) * 2)
    return _scale_by_power(power[0], biased[0]), _scale_by_power(power[1], biased[1])


_FRACTION_BITS = 6  # of the line: with its 5 bits before the point, all that a subnormal float16 number holds
_UNIT = 2.0 ** (_FRACTION_BITS - 24)  # 1.0 of the fixed-point number, in subnormal float16 numbers


class Line:
    """2^(s * scale + offset) for e4m3, as float16 numbers, by a line between powers of two. Below 2^-15 it is 0; at
    most 2^16."""

    def __init__(self, scale: Float32, offset: Float32):
        self.scale = scale * _UNIT
        self.offset = offset * _UNIT + (15 + LINE_SHIFT) * _UNIT

    def pair(self, s: Float32, t: Float32) -> Int32:
        """Return two results, packed."""
        scales, offsets = (self.scale, self.scale), (self.offset, self.offset)
        x, y = cute.arch.fma_packed_f32x2((s, t), scales, offsets)
        return cute.arch.inline_ptx(
            f"""{{
            .reg .b32 fixed;
            cvt.rn.relu.f16x2.f32 fixed, {{$r1}}, {{$r0}};
            shl.b32 {{$w0}}, fixed, {10 - _FRACTION_BITS};
            }}""",
            write_only_types=[Int32],
            read_only_args=[x, y],
        )

    def value(self, s: Float32) -> Float32:
        """Return one result, as a float."""
        return floats_of_f16x2(self.pair(s, s))[0]


def is_polynomial(pair: int, share: int, of: int = 16) -> bool:
    """True if pair number `pair` of a row uses the FMA units: `share` of every `of` pairs do, spread evenly."""
    return (pair + 1) * share // of > pair * share // of


def _scale_by_power(mantissa: Float32, biased: Float32) -> Float32:
    """mantissa * 2^n, where n is in the low mantissa bits of `biased`."""
    exponent = Int32(llvm.bitcast(Int32.mlir_type, biased.ir_value())) << 23
    value = Int32(llvm.bitcast(Int32.mlir_type, mantissa.ir_value())) + exponent
    return Float32(llvm.bitcast(Float32.mlir_type, value.ir_value()))
