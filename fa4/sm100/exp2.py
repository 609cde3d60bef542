"""2^x for softmax: on the special-function unit, or as a polynomial on the FMA units for a share of the elements.

The polynomial path splits x = n + f. A round-down addition of 1.5 * 2^23 gives n = floor(x), a minimax polynomial gives
2^f on [0, 1), and an integer addition puts n into the exponent field. Packed FMA handles two elements at a time.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm

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


def _scale_by_power(mantissa: Float32, biased: Float32) -> Float32:
    """mantissa * 2^n, where n is in the low mantissa bits of `biased`."""
    exponent = Int32(llvm.bitcast(Int32.mlir_type, biased.ir_value())) << 23
    value = Int32(llvm.bitcast(Int32.mlir_type, mantissa.ir_value())) + exponent
    return Float32(llvm.bitcast(Float32.mlir_type, value.ir_value()))
