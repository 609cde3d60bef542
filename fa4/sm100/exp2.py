"""2^x for the softmax: the special-function unit, or a polynomial on the FMA units for a share of the elements.

The polynomial: x = n + f with n = floor(x) taken by a round-down addition of 1.5 * 2^23, then 2^f on [0, 1) by
a minimax polynomial, then n added to the exponent field. Two elements at a time, in packed FMA.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm

# By degree, constant term first: the polynomial of least maximum relative error on [0, 1] that is 1 at 0. Evaluated in
# fp32 the errors are 8.57e-5 and 1.45e-7. Degree 3 is below half an ulp of bfloat16, so enough for P; but the row's
# sum, hence its log-sum-exp, sees it too, and degree 5 is as good there as the special-function unit.
COEFFICIENTS = {
    3: (1.0, 0.6951167583465576, 0.22764499485492706, 0.07706703990697861),
    5: (1.0, 0.6931512951850891, 0.24016444385051727, 0.05579991266131401, 0.009017030708491802, 0.0018671300495043397),
}
SMALLEST = -127.0  # the least exponent the shift can form; 2^-127 flushes to zero when P is rounded to 16 bits
_FLOOR = 12582912.0  # 1.5 * 2^23: adding it leaves the integer part in the low mantissa bits


def exp2_mufu(x: Float32) -> Float32:
    """2^x by the special-function unit (relative error 2^-22, subnormals flushed)."""
    return cute.math.exp2(x, fastmath=True)


def exp2_polynomial(x: Float32, y: Float32, degree: int = 5) -> tuple[Float32, Float32]:
    """(2^x, 2^y) on the FMA units, for x, y <= 127; anything below -127 counts as -127."""
    pair = (cute.arch.fmax(x, Float32(SMALLEST)), cute.arch.fmax(y, Float32(SMALLEST)))
    shifted = cute.arch.add_packed_f32x2(pair, (Float32(_FLOOR),) * 2, rnd="rm")
    floor = cute.arch.add_packed_f32x2(shifted, (Float32(-_FLOOR),) * 2)
    fraction = cute.arch.sub_packed_f32x2(pair, floor)
    *rest, last = COEFFICIENTS[degree]
    power = (Float32(last),) * 2
    for coefficient in reversed(rest):
        power = cute.arch.fma_packed_f32x2(power, fraction, (Float32(coefficient),) * 2)
    return _scale_by_power(power[0], shifted[0]), _scale_by_power(power[1], shifted[1])


def is_polynomial(pair: int, share: int, of: int = 16) -> bool:
    """Whether the pair-th pair of a row goes to the polynomial: `share` of every `of` pairs, spread evenly."""
    return (pair + 1) * share // of > pair * share // of


def _scale_by_power(mantissa: Float32, shifted: Float32) -> Float32:
    """mantissa * 2^n, n being the low mantissa bits of `shifted`."""
    exponent = Int32(llvm.bitcast(Int32.mlir_type, shifted.ir_value())) << 23
    value = Int32(llvm.bitcast(Int32.mlir_type, mantissa.ir_value())) + exponent
    return Float32(llvm.bitcast(Float32.mlir_type, value.ir_value()))
