"""cvt in its forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from warpcheck_cases.opcodes import exact
from warpcheck_cases.opcodes.case import Case, Inputs, elementwise
from warpcheck_cases.opcodes.exact import BF16, E4M3, E5M2, F16, F32, Format, decode, encode, round_integer
from warpcheck_cases.opcodes.floating import patterns
from warpcheck_cases.opcodes.integer import operands

_NAMES = {F32: "f32", F16: "f16", BF16: "bf16", E4M3: "e4m3", E5M2: "e5m2"}


def _convert(
    source: Format, result: Format, rounding: str = "rn", *, relu: bool = False, satfinite: bool = False
) -> Callable[[int], int]:
    def one(bits: int) -> int:
        value = decode(bits, source)
        if relu and not math.isnan(value) and math.copysign(1.0, value) < 0:
            value = 0.0
        return encode(value, result, rounding, satfinite=satfinite)

    return one


def _map(function: Callable[..., int], dtype: type) -> Callable[..., np.ndarray]:
    return lambda *arrays: np.array([function(*row) for row in zip(*(a.tolist() for a in arrays))], dtype)


def _case(opcode: str, result: str, types: list[str], inputs: Callable, expected: Callable, **options: Any) -> Case:
    """The opcode with one source for each of `types`."""
    sources = ", ".join(f"%x{i}" for i in range(len(types)))
    code = f"{opcode} %y, {sources};"
    return elementwise(opcode, code, result=result, operands=types, inputs=inputs, expected=expected, **options)


def _floats_to_floats() -> list[Case]:
    cases = []
    for result in (F16, BF16):
        for rounding in ("rn", "rz"):
            for relu in ("", ".relu"):
                opcode = f"cvt.{rounding}{relu}.{_NAMES[result]}.f32"
                convert = _convert(F32, result, rounding, relu=bool(relu))
                cases.append(
                    _case(opcode, "b16", ["b32"], patterns(F32, 1), _map(convert, np.uint16), element=_NAMES[result])
                )
                pair = opcode.replace(f"{_NAMES[result]}.f32", f"{_NAMES[result]}x2.f32")
                packed = _map(lambda a, b, f=convert: f(a) << 16 | f(b), np.uint32)
                cases.append(_case(pair, "b32", ["b32"] * 2, patterns(F32, 2), packed, element=_NAMES[result]))
    for source, target in ((F16, "sm_80"), (BF16, "sm_90a")):
        opcode = f"cvt.f32.{_NAMES[source]}"
        cases.append(
            _case(
                opcode,
                "b32",
                ["b16"],
                patterns(source, 1),
                _map(_convert(source, F32), np.uint32),
                element="f32",
                target=target,
            )
        )
    for narrow in (E4M3, E5M2):
        name = _NAMES[narrow]
        for relu in ("", ".relu"):
            opcode = f"cvt.rn.satfinite{relu}.{name}x2.f32"
            convert = _convert(F32, narrow, relu=bool(relu), satfinite=True)
            packed = _map(lambda a, b, f=convert: f(a) << 8 | f(b), np.uint16)
            cases.append(_case(opcode, "b16", ["b32"] * 2, _moderate, packed, target="sm_90a"))
        opcode = f"cvt.rn.f16x2.{name}x2"
        widen = _convert(narrow, F16)
        unpacked = _map(lambda a, f=widen: f(a >> 8) << 16 | f(a & 0xFF), np.uint32)
        cases.append(_case(opcode, "b32", ["b16"], _bytes, unpacked, element="f16", target="sm_90a"))
    cases.append(
        elementwise(
            "cvt.rna.tf32.f32",
            "cvt.rna.tf32.f32 %y, %x0;",
            result="b32",
            operands=["b32"],
            inputs=lambda rng: (rng.normal(size=256).astype(np.float32).view(np.uint32),),
            expected=lambda a: ((a + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).astype(np.uint32),
        )
    )
    return cases


def _moderate(rng: np.random.Generator) -> Inputs:
    """Values around the ranges of the 8-bit formats, and the special ones."""
    special = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 448.0, 464.0, 480.0, 57344.0, 61440.0, 2**-9, 2**-10, 2**-17]
    )
    arrays = []
    for _ in range(2):
        values = rng.choice([-1.0, 1.0], 256) * np.exp2(rng.uniform(-20, 18, 256))
        values[:64] = rng.choice(special, 64)
        arrays.append(values.astype(np.float32).view(np.uint32))
    return tuple(arrays)


def _bytes(rng: np.random.Generator) -> Inputs:
    low = np.arange(256, dtype=np.uint16)
    return (low | rng.permutation(low) << np.uint16(8),)


def _floats_to_integers() -> list[Case]:
    cases = []
    for rounding in ("rni", "rzi", "rmi", "rpi"):
        for kind, bits, signed in (("s32", 32, True), ("u32", 32, False), ("s64", 64, True), ("u64", 64, False)):
            low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)

            def one(pattern: int, rounding: str = rounding, low: int = low, high: int = high, bits: int = bits) -> int:
                value = decode(pattern, F32)
                if math.isnan(value):
                    return 0 if bits == 32 else 1 << 63
                if math.isinf(value):
                    return (high if value > 0 else low) & ((1 << bits) - 1)
                return max(low, min(high, round_integer(exact.Fraction(value), rounding))) & ((1 << bits) - 1)

            opcode = f"cvt.{rounding}.{kind}.f32"
            dtype = np.uint32 if bits == 32 else np.uint64
            cases.append(_case(opcode, f"b{bits}", ["b32"], _around_integers, _map(one, dtype)))
        opcode = f"cvt.{rounding}.f32.f32"

        def integral(pattern: int, rounding: str = rounding) -> int:
            value = decode(pattern, F32)
            if not math.isfinite(value) or not value:
                return encode(value, F32)
            whole = round_integer(exact.Fraction(value), rounding)
            return encode(exact.Fraction(whole) if whole else (-0.0 if value < 0 else 0.0), F32)

        cases.append(_case(opcode, "b32", ["b32"], _around_integers, _map(integral, np.uint32), element="f32"))
    return cases


def _around_integers(rng: np.random.Generator) -> Inputs:
    values = rng.uniform(-40, 40, 256)
    values[:128] = np.round(values[:128] * 2) / 2
    values[128:160] *= np.exp2(rng.uniform(10, 70, 32))
    values[160:168] = [0.0, -0.0, np.inf, -np.inf, 2.0**31, -(2.0**31), 2.0**63, -(2.0**63)]
    return (values.astype(np.float32).view(np.uint32),)


def _integers() -> list[Case]:
    cases = []
    for kind, bits, signed in (("s32", 32, True), ("u32", 32, False), ("s64", 64, True), ("u64", 64, False)):
        for rounding in ("rn", "rz"):
            opcode = f"cvt.{rounding}.f32.{kind}"

            def one(pattern: int, rounding: str = rounding, bits: int = bits, signed: bool = signed) -> int:
                value = pattern - (1 << bits) if signed and pattern >> (bits - 1) else pattern
                return encode(exact.Fraction(value), F32, rounding)

            cases.append(_case(opcode, "b32", [f"b{bits}"], operands(bits, 1), _map(one, np.uint32), element="f32"))
    for source, source_bits in (("s8", 8), ("u8", 8), ("s16", 16), ("u16", 16), ("s32", 32), ("u32", 32)):
        for result, result_bits in (("s32", 32), ("u32", 32), ("s64", 64), ("u64", 64)):
            register = max(16, source_bits)

            def widen(
                pattern: int, bits: int = source_bits, signed: bool = source[0] == "s", to: int = result_bits
            ) -> int:
                low = pattern & ((1 << bits) - 1)
                return (low - (1 << bits) if signed and low >> (bits - 1) else low) & ((1 << to) - 1)

            opcode = f"cvt.{result}.{source}"
            if source == result:
                continue
            cases.append(
                _case(
                    opcode,
                    f"b{result_bits}",
                    [f"b{register}"],
                    operands(register, 1),
                    _map(widen, np.uint32 if result_bits == 32 else np.uint64),
                )
            )
    for result, low, high in (("s8", -128, 127), ("u8", 0, 255), ("s16", -32768, 32767), ("u16", 0, 65535)):
        opcode = f"cvt.sat.{result}.s32"

        def saturate(pattern: int, low: int = low, high: int = high) -> int:
            value = pattern - (1 << 32) if pattern >> 31 else pattern
            return max(low, min(high, value)) & 0xFFFFFFFF

        wide = f"cvt.{'s' if low < 0 else 'u'}32.{result} %y, %h0;"
        cases.append(
            elementwise(
                opcode,
                f"{opcode} %h0, %x0; {wide}",
                result="b32",
                operands=["b32"],
                inputs=operands(32, 1),
                expected=_map(saturate, np.uint32),
            )
        )
    return cases


CASES = [*_floats_to_floats(), *_floats_to_integers(), *_integers()]
