"""Arithmetic of binary floating-point formats on exact rationals: the oracle of the opcode cases.

Values travel as `Fraction`, or as one of the floats nan, inf, -inf and -0.0 where a rational cannot say it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

Value = Fraction | float


@dataclass(frozen=True, slots=True)
class Format:
    """A binary format: widths in bits, and whether it has infinities ("fn" formats keep one NaN and none)."""

    bits: int
    exponent_bits: int
    mantissa_bits: int
    infinities: bool = True

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def smallest_exponent(self) -> int:
        return 1 - self.bias

    @property
    def max_finite(self) -> Fraction:
        top = (1 << self.exponent_bits) - 1 - self.bias
        if self.infinities:
            return (2 - Fraction(1, 1 << self.mantissa_bits)) * Fraction(2) ** (top - 1)
        return (2 - Fraction(2, 1 << self.mantissa_bits)) * Fraction(2) ** top


F32 = Format(32, 8, 23)
F16 = Format(16, 5, 10)
BF16 = Format(16, 8, 7)
E5M2 = Format(8, 5, 2)
E4M3 = Format(8, 4, 3, infinities=False)


def decode(bits: int, fmt: Format) -> Value:
    """The value of a bit pattern."""
    sign = -1 if bits >> (fmt.bits - 1) & 1 else 1
    exponent = bits >> fmt.mantissa_bits & ((1 << fmt.exponent_bits) - 1)
    mantissa = bits & ((1 << fmt.mantissa_bits) - 1)
    if exponent == (1 << fmt.exponent_bits) - 1:
        if fmt.infinities:
            return math.nan if mantissa else sign * math.inf
        if mantissa == (1 << fmt.mantissa_bits) - 1:
            return math.nan
    if exponent == 0:
        magnitude = Fraction(mantissa, 1 << fmt.mantissa_bits) * Fraction(2) ** fmt.smallest_exponent
    else:
        magnitude = (1 + Fraction(mantissa, 1 << fmt.mantissa_bits)) * Fraction(2) ** (exponent - fmt.bias)
    return -0.0 if sign < 0 and not magnitude else sign * magnitude


def encode(value: Value, fmt: Format, rounding: str = "rn", *, ftz: bool = False, satfinite: bool = False) -> int:
    """Round to a bit pattern; NaN becomes the canonical all-ones NaN with a positive sign.

    rounding: "rn" (nearest, ties to even), "rz", "rm" (down), "rp" (up).
    ftz: a result that is subnormal when rounded with an unbounded exponent becomes zero.
    """
    sign_bit = 1 << (fmt.bits - 1)
    all_ones = (1 << (fmt.bits - 1)) - 1
    if isinstance(value, float) and math.isnan(value):
        return all_ones
    negative = math.copysign(1.0, value) < 0 if isinstance(value, float) else value < 0
    sign = sign_bit if negative else 0
    infinity = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
    max_bits = (infinity if fmt.infinities else all_ones) - 1
    if isinstance(value, float) and math.isinf(value):
        if satfinite:
            return sign | max_bits
        return sign | (infinity if fmt.infinities else all_ones)
    magnitude = abs(Fraction(value))
    if not magnitude:
        return sign
    exponent = _floor_log2(magnitude)
    if ftz and exponent < fmt.smallest_exponent:
        step = Fraction(2) ** (exponent - fmt.mantissa_bits)
        if _round(magnitude / step, rounding, negative) * step < Fraction(2) ** fmt.smallest_exponent:
            return sign
    exponent = max(exponent, fmt.smallest_exponent)
    scaled = magnitude / Fraction(2) ** (exponent - fmt.mantissa_bits)
    whole = _round(scaled, rounding, negative)
    rounded = whole * Fraction(2) ** (exponent - fmt.mantissa_bits)
    if rounded > fmt.max_finite:
        away = rounding == "rn" or (rounding == "rm" and negative) or (rounding == "rp" and not negative)
        if satfinite or not away:
            return sign | max_bits
        return sign | (infinity if fmt.infinities else all_ones)
    if rounded < Fraction(2) ** fmt.smallest_exponent:
        return sign | whole
    exponent = _floor_log2(rounded)
    mantissa = int(rounded / Fraction(2) ** (exponent - fmt.mantissa_bits)) - (1 << fmt.mantissa_bits)
    return sign | (exponent + fmt.bias) << fmt.mantissa_bits | mantissa


def round_integer(value: Fraction, rounding: str) -> int:
    """To an integer: "rni" (nearest even), "rzi", "rmi", "rpi"."""
    negative = value < 0
    magnitude = _round(abs(value), rounding.removesuffix("i"), negative)
    return -magnitude if negative else magnitude


def _floor_log2(value: Fraction) -> int:
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def _round(magnitude: Fraction, rounding: str, negative: bool) -> int:
    whole, rest = divmod(magnitude, 1)
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1),
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[rounding]
    return int(whole) + int(up)


def add(a: Value, b: Value, rounding: str = "rn") -> Value:
    """a + b, exactly; the sign of an exact zero follows IEEE 754."""
    if (isinstance(a, float) and not math.isfinite(a)) or (isinstance(b, float) and not math.isfinite(b)):
        return float(a) + float(b) if isinstance(a, float) and isinstance(b, float) else _infinite(a, b)
    total = Fraction(a) + Fraction(b)
    if total:
        return total
    both_negative = _is_negative(a) and _is_negative(b)
    opposite = _is_negative(a) != _is_negative(b)
    return -0.0 if both_negative or (opposite and rounding == "rm") else Fraction(0)


def _infinite(a: Value, b: Value) -> float:
    return a if isinstance(a, float) and not math.isfinite(a) else b  # type: ignore[return-value]


def mul(a: Value, b: Value) -> Value:
    """a * b, exactly."""
    if any(isinstance(x, float) and math.isnan(x) for x in (a, b)):
        return math.nan
    negative = _is_negative(a) != _is_negative(b)
    if any(isinstance(x, float) and math.isinf(x) for x in (a, b)):
        if not a or not b:
            return math.nan
        return -math.inf if negative else math.inf
    product = Fraction(a) * Fraction(b)
    return product if product else (-0.0 if negative else Fraction(0))


def fma(a: Value, b: Value, c: Value, rounding: str = "rn") -> Value:
    """a * b + c, exactly."""
    return add(mul(a, b), c, rounding)


def negate(a: Value) -> Value:
    return -a if isinstance(a, float) or a else -0.0


def flush(a: Value, fmt: Format) -> Value:
    """A subnormal input of an .ftz instruction: zero of the same sign."""
    if isinstance(a, Fraction) and 0 < abs(a) < Fraction(2) ** fmt.smallest_exponent:
        return -0.0 if a < 0 else Fraction(0)
    return a


def _is_negative(a: Value) -> bool:
    return math.copysign(1.0, a) < 0 if isinstance(a, float) else a < 0


def lift(
    function: Callable[..., Value], fmt: Format, rounding: str = "rn", *, ftz: bool = False, satfinite: bool = False
) -> Callable[..., np.ndarray]:
    """Turn a function on exact values into one on arrays of bit patterns of `fmt`, rounding its result."""
    dtype = {8: np.uint8, 16: np.uint16, 32: np.uint32}[fmt.bits]

    def on_bits(*arrays: np.ndarray) -> np.ndarray:
        results = []
        for patterns in zip(*(array.tolist() for array in arrays)):
            values = [decode(pattern, fmt) for pattern in patterns]
            if ftz:
                values = [flush(value, fmt) for value in values]
            results.append(encode(function(*values), fmt, rounding, ftz=ftz, satfinite=satfinite))
        return np.array(results, dtype)

    return on_bits
