"""Operators of graphs on device values."""

from __future__ import annotations

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from .score import TIMES, tanh_of
from .softmax import LOG2_E

KINDS = {"float": Float32, "int": Int32, "bool": Boolean}


def _times(x: Float32, factor: Float32 | None, constant: float) -> Float32:
    return x * (Float32(constant) if factor is None else factor * constant)


# Operators of x * factor. The factor is the same for all elements, or None.
SCALED_OPS = {
    "tanh": lambda x, factor: tanh_of(_times(x, factor, TIMES)),
    "exp": lambda x, factor: cute.math.exp2(_times(x, factor, LOG2_E), fastmath=True),
    "exp2": lambda x, factor: cute.math.exp2(x if factor is None else x * factor, fastmath=True),
    "sigmoid": lambda x, factor: cute.arch.rcp_approx(1.0 + cute.math.exp2(_times(x, factor, -LOG2_E), fastmath=True)),
}


def apply(op: str, kinds: list[str], args: list, constants: list) -> Any:
    """Apply an operator of `mods.ir.graph.OPERATORS`. kinds, constants: of its arguments; None if not constant."""
    a, b = args[0], args[1] if len(args) > 1 else None
    if op in _COMPARE:
        return Boolean(_COMPARE[op](a, b))
    if op == "where":
        return KINDS[kinds[1]](cutlass.select_(a, b, args[2]))
    if op == "to_float":
        return Float32(cutlass.select_(a, Float32(1.0), Float32(0.0))) if kinds[0] == "bool" else Float32(a)
    if op == "to_int":
        return Int32(cutlass.select_(a, Int32(1), Int32(0))) if kinds[0] == "bool" else Int32(a)
    if op == "to_bool":
        return Boolean(a != 0)
    if op in ("floordiv", "mod"):
        power = constants[1] if constants[1] is not None and constants[1] & (constants[1] - 1) == 0 else 0
        if power > 0:
            return a >> int(math.log2(power)) if op == "floordiv" else a & (power - 1)
        # Round towards minus infinity, as Python does, for any rounding of the compiler's division.
        quotient = a // b
        remainder = a - quotient * b
        signs_differ = Boolean(remainder != 0) & Boolean((remainder ^ b) < 0)
        if op == "floordiv":
            return quotient - Int32(cutlass.select_(signs_differ, Int32(1), Int32(0)))
        return remainder + Int32(cutlass.select_(signs_differ, b, Int32(0)))
    return _FLOATS[op](*args) if kinds[0] == "float" and op in _FLOATS else _ANY[op](*args)


# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: absolute error at most 1.5e-7.
_ERF = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
_ERF_P = 0.3275911


def _erf(x: Float32) -> Float32:
    """erf(x) without a branch. The library's erf branches per element; between branches the compiler moves stores of
    product operands past the fence before the products."""
    abs_x = cute.arch.fmax(x, -x)
    t = cute.arch.rcp_approx(1.0 + _ERF_P * abs_x)
    poly = Float32(_ERF[-1])
    for coefficient in reversed(_ERF[:-1]):
        poly = poly * t + coefficient
    erfc = poly * t * cute.math.exp2(x * x * -LOG2_E, fastmath=True)
    return Float32(cutlass.select_(x < 0.0, erfc - 1.0, 1.0 - erfc))


def _log1p(x: Float32) -> Float32:
    """log(1 + x) as log(u) x / (u - 1), u = 1 + x rounded: the factor corrects the rounding error. From 2^24 on u is x.

    Source: Goldberg, "What every computer scientist should know about floating-point arithmetic", theorem 4.
    """
    u = 1.0 + x
    exact = u - 1.0
    is_rounded = Boolean(exact != 0.0) & Boolean(x < 16777216.0)
    factor = Float32(cutlass.select_(is_rounded, x / exact, Float32(1.0)))
    return Float32(cutlass.select_(exact == 0.0, x, cute.math.log(u) * factor))


# Abramowitz and Stegun, 4.4.49: arctan(x) / x for |x| <= 1 as a polynomial in x^2, error at most 2e-8.
_ATAN = (
    1.0, -0.3333314528, 0.1999355085, -0.1420889944, 0.1065626393, -0.0752896400, 0.0429096138, -0.0161657367,
    0.0028662257,
)  # fmt: skip


def _atan2(y: Float32, x: Float32) -> Float32:
    """atan2(y, x) without a branch, as `_erf`: arctan of smaller / larger magnitude, then corrected by octant."""
    a, b = cute.arch.fmax(y, -y), cute.arch.fmax(x, -x)
    low, high = cute.arch.fmin(a, b), cute.arch.fmax(a, b)
    ratio = Float32(cutlass.select_(low == high, Float32(1.0), low / high))
    square = ratio * ratio
    poly = Float32(_ATAN[-1])
    for coefficient in reversed(_ATAN[:-1]):
        poly = poly * square + coefficient
    angle = poly * ratio
    angle = Float32(cutlass.select_(a > b, math.pi / 2 - angle, angle))
    angle = Float32(cutlass.select_(x < 0.0, math.pi - angle, angle))
    angle = Float32(cutlass.select_(high == 0.0, Float32(0.0), angle))
    return Float32(cutlass.select_(y < 0.0, -angle, angle))


_COMPARE = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
_ANY = {
    "neg": lambda a: -a, "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "abs": lambda a: cutlass.max(a, -a), "min": cutlass.min, "max": cutlass.max, "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b, "bitand": lambda a, b: a & b, "bitor": lambda a, b: a | b,
    "bitxor": lambda a, b: a ^ b, "and": lambda a, b: Boolean(a & b), "or": lambda a, b: Boolean(a | b),
    "xor": lambda a, b: Boolean(a ^ b), "not": lambda a: Boolean(a ^ Boolean(True)),
}  # fmt: skip
_FLOATS = {
    "abs": lambda a: cute.arch.fmax(a, -a), "min": cute.arch.fmin, "max": cute.arch.fmax, "div": lambda a, b: a / b,
    "log": lambda a: cute.math.log(a), "log2": lambda a: cute.math.log2(a), "sqrt": lambda a: cute.math.sqrt(a),
    "rsqrt": lambda a: cute.math.rsqrt(a), "sin": lambda a: cute.math.sin(a), "cos": lambda a: cute.math.cos(a),
    "erf": _erf, "log1p": _log1p, "atan2": _atan2, "floor": lambda a: cute.math.floor(a),
    "ceil": lambda a: cute.math.ceil(a), "trunc": lambda a: Float32(Int32(a)),
    "pow": lambda a, b: cute.math.exp2(b * cute.math.log2(a)),
}  # fmt: skip
