"""Floating-point arithmetic, comparison and approximation."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from warpcheck_cases.opcodes import exact
from warpcheck_cases.opcodes.case import Case, Inputs, elementwise
from warpcheck_cases.opcodes.exact import BF16, F16, F32, Format, Value, lift

_NAMES = {F32: "f32", F16: "f16", BF16: "bf16"}


def patterns(fmt: Format, count: int) -> Callable[[np.random.Generator], Inputs]:
    """Bit patterns: zeros, subnormals, ones, halves between neighbours, infinities, NaN, and random ones."""

    def make(rng: np.random.Generator) -> Inputs:
        sign = 1 << (fmt.bits - 1)
        infinity = ((1 << fmt.exponent_bits) - 1) << fmt.mantissa_bits
        one = fmt.bias << fmt.mantissa_bits
        base = [
            0,
            1,
            2,
            (1 << fmt.mantissa_bits) - 1,
            1 << fmt.mantissa_bits,
            one,
            one + 1,
            one - 1,
            infinity - 1,
            infinity,
            infinity | 1 << (fmt.mantissa_bits - 1),
        ]
        corners = np.array(base + [sign | b for b in base], np.uint64)
        arrays = []
        for _ in range(count):
            near_one = one + rng.integers(-3 << fmt.mantissa_bits, 3 << fmt.mantissa_bits, 256)
            values = near_one.astype(np.uint64) | (rng.integers(0, 2, 256).astype(np.uint64) << np.uint64(fmt.bits - 1))
            values[:96] = rng.choice(corners, 96)
            values[96:144] = rng.integers(0, 1 << fmt.bits, 48, dtype=np.uint64)
            arrays.append(values.astype(f"u{fmt.bits // 8}"))
        return tuple(arrays)

    return make


def _binary(
    opcode: str,
    fmt: Format,
    function: Callable[..., np.ndarray],
    count: int,
    target: str = "sm_80",
    *,
    inputs: Callable[[np.random.Generator], Inputs] | None = None,
    values: int = 1,
) -> Case:
    """An instruction with `count` operands. values: values of the format in one register."""
    arguments = ", ".join(f"%x{i}" for i in range(count))
    kind = f"b{values * fmt.bits}"
    return elementwise(
        opcode,
        f"{opcode} %y, {arguments};",
        result=kind,
        operands=[kind] * count,
        inputs=inputs or patterns(fmt, count),
        expected=function,
        element=_NAMES[fmt],
        target=target,
    )


def _packed2(opcode: str, fmt: Format, function: Callable[..., np.ndarray], count: int, target: str = "sm_80") -> Case:
    """An instruction on two values in one register: each half is computed by itself."""
    half = {16: np.uint16, 32: np.uint32}[fmt.bits]
    whole = {16: np.uint32, 32: np.uint64}[fmt.bits]
    single = patterns(fmt, 2 * count)

    def inputs(rng: np.random.Generator) -> Inputs:
        arrays = single(rng)
        pairs = zip(arrays[:count], arrays[count:])
        return tuple(np.stack(pair, axis=-1).reshape(-1).view(whole) for pair in pairs)

    def expected(*arrays: np.ndarray) -> np.ndarray:
        return function(*(array.view(half) for array in arrays))

    return _binary(opcode, fmt, expected, count, target, inputs=inputs, values=2)


def _minimum(a: Value, b: Value) -> Value:
    """NaN loses to a number; -0 is smaller than +0."""
    if math.isnan(a):
        return b
    if math.isnan(b):
        return a
    if a == b:
        return a if math.copysign(1.0, a) < 0 else b
    return min(a, b)


def _maximum(a: Value, b: Value) -> Value:
    return exact.negate(_minimum(exact.negate(a), exact.negate(b)))


def _or_nan(function: Callable[..., Value]) -> Callable[..., Value]:
    return lambda *args: math.nan if any(math.isnan(a) for a in args) else function(*args)


def _arithmetic() -> list[Case]:
    cases = []
    subtract = lambda a, b, rounding="rn": exact.add(a, exact.negate(b), rounding)  # noqa: E731
    for rounding in ("rn", "rz", "rm", "rp"):
        for ftz in ("", ".ftz"):
            flags = {"rounding": rounding, "ftz": bool(ftz)}
            add = lift(lambda a, b, r=rounding: exact.add(a, b, r), F32, **flags)
            sub = lift(lambda a, b, r=rounding: subtract(a, b, r), F32, **flags)
            fma = lift(lambda a, b, c, r=rounding: exact.fma(a, b, c, r), F32, **flags)
            cases += [
                _binary(f"add.{rounding}{ftz}.f32", F32, add, 2),
                _binary(f"sub.{rounding}{ftz}.f32", F32, sub, 2),
                _binary(f"mul.{rounding}{ftz}.f32", F32, lift(exact.mul, F32, **flags), 2),
                _binary(f"fma.{rounding}{ftz}.f32", F32, fma, 3),
                _packed2(f"add.{rounding}{ftz}.f32x2", F32, add, 2, "sm_100a"),
                _packed2(f"mul.{rounding}{ftz}.f32x2", F32, lift(exact.mul, F32, **flags), 2, "sm_100a"),
                _packed2(f"fma.{rounding}{ftz}.f32x2", F32, fma, 3, "sm_100a"),
            ]
    for fmt in (F16, BF16):
        name = _NAMES[fmt]
        target = "sm_80" if fmt is F16 else "sm_90a"
        for opcode, function, count in (("add", exact.add, 2), ("sub", subtract, 2), ("mul", exact.mul, 2)):
            cases += [
                _binary(f"{opcode}.rn.{name}", fmt, lift(function, fmt), count, target),
                _packed2(f"{opcode}.rn.{name}x2", fmt, lift(function, fmt), count, target),
            ]
        cases += [
            _binary(f"fma.rn.{name}", fmt, lift(exact.fma, fmt), 3),
            _packed2(f"fma.rn.{name}x2", fmt, lift(exact.fma, fmt), 3),
        ]
    for fmt in (F32, F16, BF16):
        name = _NAMES[fmt]
        cases += [
            _binary(f"min.{name}", fmt, lift(_minimum, fmt), 2),
            _binary(f"max.{name}", fmt, lift(_maximum, fmt), 2),
            _binary(f"min.NaN.{name}", fmt, lift(_or_nan(_minimum), fmt), 2),
            _binary(f"max.NaN.{name}", fmt, lift(_or_nan(_maximum), fmt), 2),
            _binary(f"neg.{name}", fmt, lift(exact.negate, fmt), 1),
            _binary(f"abs.{name}", fmt, lift(lambda a: exact.negate(a) if math.copysign(1.0, a) < 0 else a, fmt), 1),
        ]
    cases += [_three_input_max(), *_flushed_products()]
    return cases


def _flushed_products() -> list[Case]:
    """Products about the least normal number: which of them does .ftz flush?"""

    def inputs(rng: np.random.Generator) -> Inputs:
        near = lambda bits: (bits + rng.integers(-4096, 4096, 256)).astype(np.uint32)  # noqa: E731
        return near(0x00802000), near(0x3F7FF000)

    return [
        elementwise(
            f"mul.{rounding}.ftz.f32 about the least normal number",
            f"mul.{rounding}.ftz.f32 %y, %x0, %x1;",
            result="b32",
            operands=["b32"] * 2,
            inputs=inputs,
            expected=lift(exact.mul, F32, rounding=rounding, ftz=True),
            element="f32",
        )
        for rounding in ("rn", "rz", "rm", "rp")
    ]


def _three_input_max() -> Case:
    expected = lift(lambda a, b, c: _maximum(_maximum(a, b), c), F32)
    return elementwise(
        "max.f32 of three",
        "max.f32 %y, %x0, %x1, %x2;",
        result="b32",
        operands=["b32"] * 3,
        inputs=patterns(F32, 3),
        expected=expected,
        element="f32",
        target="sm_100a",
    )


def _divide(a: Value, b: Value) -> Value:
    if math.isnan(a) or math.isnan(b) or (math.isinf(a) and math.isinf(b)) or (not a and not b):
        return math.nan
    negative = (math.copysign(1.0, a) < 0) != (math.copysign(1.0, b) < 0)
    if math.isinf(a) or not b:
        return -math.inf if negative else math.inf
    if math.isinf(b) or not a:
        return -0.0 if negative else Fraction(0)
    return Fraction(a) / Fraction(b)


def _square_root(a: Value) -> Value:
    if math.isnan(a) or a < 0:
        return math.nan
    if not a or math.isinf(a):
        return a
    # 60 correct bits and a sticky one: enough to round to 24.
    shift = 240
    root = math.isqrt(a.numerator * 4**shift // a.denominator)
    return Fraction(2 * root + int(Fraction(root * root) != a * 4**shift), 2 ** (shift + 1))


def _division() -> list[Case]:
    cases = []
    for rounding in ("rn", "rz", "rm", "rp"):
        cases += [
            _binary(f"div.{rounding}.f32", F32, lift(_divide, F32, rounding), 2),
            _binary(f"rcp.{rounding}.f32", F32, lift(lambda a: _divide(Fraction(1), a), F32, rounding), 1),
            _binary(f"sqrt.{rounding}.f32", F32, lift(_square_root, F32, rounding), 1),
        ]
    return cases


def _comparisons() -> list[Case]:
    ordered = {
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b and not _unordered(a, b),
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
        "num": lambda a, b: not _unordered(a, b),
        "nan": lambda a, b: _unordered(a, b),
    }
    functions: dict[str, Callable[[float, float], bool]] = dict(ordered)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        functions[f"{name}u"] = lambda a, b, f=ordered[name]: f(a, b) or _unordered(a, b)
    cases = []
    for name, function in functions.items():

        def expected(a: np.ndarray, b: np.ndarray, f: Callable = function) -> np.ndarray:
            rows = zip(a.view(np.float32).tolist(), b.view(np.float32).tolist())
            return np.array([int(f(x, y)) for x, y in rows], np.uint32)

        code = f"setp.{name}.f32 %p0, %x0, %x1; selp.b32 %y, 1, 0, %p0;"
        cases.append(
            elementwise(
                f"setp.{name}.f32", code, result="b32", operands=["b32"] * 2, inputs=patterns(F32, 2), expected=expected
            )
        )
    return cases


def _unordered(a: float, b: float) -> bool:
    return math.isnan(a) or math.isnan(b)


def _approximate(
    opcode: str,
    function: Callable[[np.ndarray], np.ndarray],
    error: str,
    low: float,
    high: float,
    target: str = "sm_80",
) -> Case:
    """On normal numbers between the bounds, against float64, within the error that the ISA documents."""

    def inputs(rng: np.random.Generator) -> Inputs:
        magnitude = np.exp2(rng.uniform(-10, 10, 256)) if low > 0 else rng.uniform(low, high, 256)
        return (np.clip(magnitude, low, high).astype(np.float32).view(np.uint32),)

    def expected(a: np.ndarray) -> np.ndarray:
        return function(a.view(np.float32).astype(np.float64))

    return elementwise(
        opcode,
        f"{opcode} %y, %x0;",
        result="b32",
        operands=["b32"],
        inputs=inputs,
        expected=expected,
        element="f32",
        compare=error,
        target=target,
    )


def _approximations() -> list[Case]:
    cases = []
    for ftz in ("", ".ftz"):
        cases += [
            _approximate(f"ex2.approx{ftz}.f32", np.exp2, "ulp 2", -60.0, 60.0),
            _approximate(f"rcp.approx{ftz}.f32", lambda x: 1 / x, "ulp 1", 1e-3, 1e3),
            _approximate(f"rsqrt.approx{ftz}.f32", lambda x: 1 / np.sqrt(x), f"rel {2**-22.9}", 1e-3, 1e3),
            _approximate(f"sqrt.approx{ftz}.f32", np.sqrt, f"rel {2**-23 * 4}", 1e-3, 1e3),
            _approximate(f"lg2.approx{ftz}.f32", np.log2, f"abs {2**-22}", 0.51, 1.99),
            _approximate(f"sin.approx{ftz}.f32", np.sin, f"abs {2**-20.5}", -3.14, 3.14),
            _approximate(f"cos.approx{ftz}.f32", np.cos, f"abs {2**-20.5}", -3.14, 3.14),
        ]
    cases.append(_approximate("tanh.approx.f32", np.tanh, f"rel {2**-11}", -5.0, 5.0))
    return cases + _special_values()


def _special_values() -> list[Case]:
    """The tables of special inputs that each approximate instruction documents, to the bit."""
    nan, inf = math.nan, math.inf
    arguments = (-inf, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, inf, nan)
    tables = {
        "ex2.approx.ftz.f32": (0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 2.0, inf, nan),
        "rcp.approx.ftz.f32": (-0.0, -1.0, -inf, -inf, inf, inf, 1.0, 0.0, nan),
        "rsqrt.approx.ftz.f32": (nan, nan, -inf, -inf, inf, inf, 1.0, 0.0, nan),
        "lg2.approx.ftz.f32": (nan, nan, -inf, -inf, -inf, -inf, 0.0, inf, nan),
        "sqrt.approx.ftz.f32": (nan, nan, -0.0, -0.0, 0.0, 0.0, 1.0, inf, nan),
        "tanh.approx.f32": (-1.0, None, None, -0.0, 0.0, None, None, 1.0, nan),
    }
    cases = []
    for opcode, table in tables.items():
        known = [(x, y) for x, y in zip(arguments, table) if y is not None]
        given, results = np.array(known, np.float32).T.copy().view(np.uint32)
        cases.append(
            elementwise(
                f"{opcode} special values",
                f"{opcode} %y, %x0;",
                result="b32",
                operands=["b32"],
                inputs=lambda rng, a=given: (a,),
                expected=lambda a, r=results: np.resize(r, a.shape),
                element="f32",
            )
        )
    return cases


CASES = [*_arithmetic(), *_division(), *_comparisons(), *_approximations()]
