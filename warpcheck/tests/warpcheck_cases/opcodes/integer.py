"""Integer, bit and selection instructions, on Python's unbounded integers."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
from warpcheck_cases.opcodes.case import Case, Inputs, elementwise

_CORNERS = (0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF)


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def operands(bits: int, count: int, *, nonzero_last: bool = False) -> Callable[[np.random.Generator], Inputs]:
    """Arrays of bit patterns: corners against corners, then random values of every magnitude."""

    def make(rng: np.random.Generator) -> Inputs:
        mask = (1 << bits) - 1
        top = (mask, mask >> 1, (mask >> 1) + 1, mask - 1)
        corners = np.array([c & mask for c in (*_CORNERS, *top)], np.uint64)
        arrays = []
        for i in range(count):
            shift = rng.integers(0, bits, 256).astype(np.uint64)
            values = rng.integers(0, mask, 256, dtype=np.uint64, endpoint=True) >> shift
            values[:128] = rng.choice(corners, 128)
            if nonzero_last and i == count - 1:
                values[values == 0] = 3
            arrays.append(values.astype(f"u{bits // 8}"))
        return tuple(arrays)

    return make


def _case(
    opcode: str,
    bits: int,
    count: int,
    function: Callable[..., int],
    *,
    signed: bool = False,
    result_bits: int | None = None,
    code: str | None = None,
    nonzero_last: bool = False,
    name: str | None = None,
    target: str = "sm_80",
) -> Case:
    """`opcode %y, %x0, ...;` (or `code`) against `function` on the operands read as signed or unsigned."""
    result_bits = result_bits or bits
    dtype = f"u{result_bits // 8}"

    def expected(*arrays: np.ndarray) -> np.ndarray:
        rows = zip(*(array.tolist() for array in arrays))
        results = (function(*(_signed(x, bits) if signed else x for x in row)) for row in rows)
        return np.array([r & ((1 << result_bits) - 1) for r in results], np.uint64).astype(dtype)

    arguments = ", ".join(f"%x{i}" for i in range(count))
    return elementwise(
        name or opcode,
        code or f"{opcode} %y, {arguments};",
        result=f"b{result_bits}",
        operands=[f"b{bits}"] * count,
        inputs=operands(bits, count, nonzero_last=nonzero_last),
        expected=expected,
        target=target,
    )


def _truncated_division(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a: int, b: int) -> int:
    return a - b * _truncated_division(a, b)


def _saturate(value: int) -> int:
    return max(-(2**31), min(2**31 - 1, value))


def _bfind(a: int, bits: int, signed: bool, shiftamt: bool) -> int:
    if signed and a < 0:
        a = ~a
    if not a:
        return 0xFFFFFFFF
    position = a.bit_length() - 1
    return bits - 1 - position if shiftamt else position


def _reverse(a: int, bits: int) -> int:
    return int(f"{a:0{bits}b}"[::-1], 2)


def _bfe(a: int, b: int, c: int, bits: int, signed: bool) -> int:
    position, length, msb = b & 0xFF, c & 0xFF, bits - 1
    sign = signed and length and a >> min(position + length - 1, msb) & 1
    bit = (a >> (position + i) & 1 if i < length and position + i <= msb else int(bool(sign)) for i in range(bits))
    return sum(value << i for i, value in enumerate(bit))


def _bfi(a: int, b: int, c: int, d: int, bits: int) -> int:
    position, length = c & 0xFF, d & 0xFF
    for i in range(length):
        if position + i < bits:
            b = b & ~(1 << (position + i)) | (a >> i & 1) << (position + i)
    return b


def _lop3(a: int, b: int, c: int, table: int) -> int:
    result = 0
    for i in range(32):
        index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1
        result |= (table >> index & 1) << i
    return result


def _prmt(a: int, b: int, control: int) -> int:
    source = b << 32 | a
    result = 0
    for i in range(4):
        select = control >> (4 * i) & 0xF
        byte = source >> (8 * (select & 7)) & 0xFF
        if select & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << (8 * i)
    return result


def _shf(a: int, b: int, c: int, *, left: bool, clamp: bool) -> int:
    amount = min(c, 32) if clamp else c & 31
    if left:
        return (b << amount | a >> (32 - amount)) if amount else b
    return (b << (32 - amount) | a >> amount) if amount else a


def _szext(a: int, b: int, *, signed: bool, clamp: bool) -> int:
    width = b & 31
    if b >= 32 and clamp:
        return a
    if not width:
        return 0
    low = a & ((1 << width) - 1)
    return _signed(low, width) if signed else low


def _bmsk(a: int, b: int, *, clamp: bool) -> int:
    if clamp:
        return 0 if a >= 32 else ((1 << min(b, 32)) - 1) << a
    return ((1 << (b & 31)) - 1) << (a & 31)


def _dp4a(a: int, b: int, c: int, *, signed: bool) -> int:
    total = c
    for i in range(4):
        x, y = a >> (8 * i) & 0xFF, b >> (8 * i) & 0xFF
        total += _signed(x, 8) * _signed(y, 8) if signed else x * y
    return total


def _on_halves(function: Callable[..., int], signed: bool) -> Callable[..., int]:
    """The function on the lower and the upper 16 bits of its operands."""

    def both(*values: int) -> int:
        parts = [(v & 0xFFFF, v >> 16) for v in values]
        low, high = (function(*(_signed(p[k], 16) if signed else p[k] for p in parts)) & 0xFFFF for k in (0, 1))
        return low | high << 16

    return both


def _packed_cases() -> list[Case]:
    functions: dict[str, Callable[..., int]] = {"add": lambda a, b: a + b, "min": min, "max": max}
    cases = [
        _case(f"{name}.{kind}x2", 32, 2, _on_halves(function, kind == "s16"), target="sm_90a")
        for name, function in functions.items()
        for kind in ("u16", "s16")
    ]
    for name, function in (("min", min), ("max", max)):
        relu = _on_halves(lambda a, b, f=function: max(0, f(a, b)), True)
        cases.append(_case(f"{name}.relu.s16x2", 32, 2, relu, target="sm_90a"))
    return cases


def _cases() -> list[Case]:
    cases = []
    for bits in (16, 32, 64):
        for kind, signed in ((f"s{bits}", True), (f"u{bits}", False)):
            cases += [
                _case(f"add.{kind}", bits, 2, lambda a, b: a + b, signed=signed),
                _case(f"sub.{kind}", bits, 2, lambda a, b: a - b, signed=signed),
                _case(f"mul.lo.{kind}", bits, 2, lambda a, b: a * b, signed=signed),
                _case(f"mul.hi.{kind}", bits, 2, lambda a, b, n=bits: a * b >> n, signed=signed),
                _case(f"mad.lo.{kind}", bits, 3, lambda a, b, c: a * b + c, signed=signed),
                _case(f"div.{kind}", bits, 2, _truncated_division, signed=signed, nonzero_last=True),
                _case(f"rem.{kind}", bits, 2, _remainder, signed=signed, nonzero_last=True),
                _case(f"min.{kind}", bits, 2, min, signed=signed),
                _case(f"max.{kind}", bits, 2, max, signed=signed),
            ]
            if bits < 64:
                wide = _case(f"mul.wide.{kind}", bits, 2, lambda a, b: a * b, signed=signed, result_bits=2 * bits)
                cases.append(wide)
        cases += [
            _case(f"neg.s{bits}", bits, 1, lambda a: -a, signed=True),
            _case(f"abs.s{bits}", bits, 1, abs, signed=True),
            _case(f"and.b{bits}", bits, 2, lambda a, b: a & b),
            _case(f"or.b{bits}", bits, 2, lambda a, b: a | b),
            _case(f"xor.b{bits}", bits, 2, lambda a, b: a ^ b),
            _case(f"not.b{bits}", bits, 1, lambda a: ~a),
            _case(f"cnot.b{bits}", bits, 1, lambda a: int(a == 0)),
        ]
    for bits in (32, 64):
        for kind, signed in ((f"s{bits}", True), (f"u{bits}", False)):
            cases += [
                _case(f"sad.{kind}", bits, 3, lambda a, b, c: c + abs(a - b), signed=signed),
                _case(f"mad.hi.{kind}", bits, 3, lambda a, b, c, n=bits: (a * b >> n) + c, signed=signed),
            ]
            for shift in (False, True):
                find = functools.partial(_bfind, bits=bits, signed=signed, shiftamt=shift)
                name = f"bfind{'.shiftamt' if shift else ''}.{kind}"
                cases.append(_case(name, bits, 1, find, signed=signed, result_bits=32))
        cases += [
            _case(f"popc.b{bits}", bits, 1, lambda a: a.bit_count(), result_bits=32),
            _case(f"clz.b{bits}", bits, 1, lambda a, n=bits: n - a.bit_length(), result_bits=32),
            _case(f"brev.b{bits}", bits, 1, lambda a, n=bits: _reverse(a, n)),
        ]
    cases += _shifts() + _fields() + _packed()
    return cases


def _shifts() -> list[Case]:
    """Amounts are 32-bit, larger ones are clamped: everything is shifted out."""
    cases = []
    for bits in (16, 32, 64):
        code = f"{{ .reg .b32 %n; cvt.u32.u{bits} %n, %x1; and.b32 %n, %n, 127; {{op}} %y, %x0, %n; }}"
        cases += [
            _case(f"shl.b{bits}", bits, 2, lambda a, b: a << (b & 127), code=code.replace("{op}", f"shl.b{bits}")),
            _case(f"shr.u{bits}", bits, 2, lambda a, b: a >> (b & 127), code=code.replace("{op}", f"shr.u{bits}")),
            _case(
                f"shr.s{bits}",
                bits,
                2,
                lambda a, b: a >> (b & 127),
                signed=True,
                code=code.replace("{op}", f"shr.s{bits}"),
            ),
        ]
    for direction, left in (("l", True), ("r", False)):
        for mode, clamp in (("clamp", True), ("wrap", False)):
            opcode = f"shf.{direction}.{mode}.b32"
            cases.append(_case(opcode, 32, 3, lambda a, b, c, x=left, y=clamp: _shf(a, b, c, left=x, clamp=y)))
    return [case if "cvt.u32.u32" not in case.ptx else _without_cvt(case) for case in cases]


def _without_cvt(case: Case) -> Case:
    from dataclasses import replace

    return replace(case, ptx=case.ptx.replace("cvt.u32.u32 %n, %x1;", "mov.b32 %n, %x1;"))


def _field_operands(position: str, length: str) -> str:
    return f"cvt.u32.u64 %n, {position}; cvt.u32.u64 %m, {length}; and.b32 %n, %n, 255; and.b32 %m, %m, 255;"


def _fields() -> list[Case]:
    """Position and length are from 0 to 255; chips ignore the higher bits of the 32-bit forms only."""
    cases = []
    for bits in (32, 64):
        narrow = "" if bits == 32 else _field_operands("%x1", "%x2")
        for kind, signed in ((f"s{bits}", True), (f"u{bits}", False)):
            operands_text = "%x1, %x2" if bits == 32 else "%n, %m"
            code = f"{{ .reg .b32 %n, %m; {narrow} bfe.{kind} %y, %x0, {operands_text}; }}"
            cases.append(
                _case(f"bfe.{kind}", bits, 3, lambda a, b, c, n=bits, s=signed: _bfe(a, b, c, n, s), code=code)
            )
        narrow = "" if bits == 32 else _field_operands("%x2", "%x3")
        operands_text = "%x2, %x3" if bits == 32 else "%n, %m"
        code = f"{{ .reg .b32 %n, %m; {narrow} bfi.b{bits} %y, %x0, %x1, {operands_text}; }}"
        cases.append(_case(f"bfi.b{bits}", bits, 4, lambda a, b, c, d, n=bits: _bfi(a, b, c, d, n), code=code))
    for mode, clamp in (("clamp", True), ("wrap", False)):
        cases += [
            _case(f"szext.{mode}.s32", 32, 2, lambda a, b, y=clamp: _szext(a, b, signed=True, clamp=y)),
            _case(f"szext.{mode}.u32", 32, 2, lambda a, b, y=clamp: _szext(a, b, signed=False, clamp=y)),
            _case(f"bmsk.{mode}.b32", 32, 2, lambda a, b, y=clamp: _bmsk(a, b, clamp=y)),
        ]
    return cases


def _packed() -> list[Case]:
    cases = [
        _case("add.sat.s32", 32, 2, lambda a, b: _saturate(a + b), signed=True),
        _case("sub.sat.s32", 32, 2, lambda a, b: _saturate(a - b), signed=True),
        _case("prmt.b32", 32, 3, _prmt),
        _case("dp4a.s32.s32", 32, 3, lambda a, b, c: _dp4a(a, b, c, signed=True)),
        _case("dp4a.u32.u32", 32, 3, lambda a, b, c: _dp4a(a, b, c, signed=False)),
        _case(
            "selp.b32",
            32,
            3,
            lambda a, b, c: a if c & 1 else b,
            code="and.b32 %r0, %x2, 1; setp.ne.b32 %p0, %r0, 0; selp.b32 %y, %x0, %x1, %p0;",
        ),
        _case(
            "slct.s32.s32",
            32,
            3,
            lambda a, b, c: a if _signed(c, 32) >= 0 else b,
            code="slct.b32.s32 %y, %x0, %x1, %x2;",
        ),
        *_packed_cases(),
        _case("min.relu.s32", 32, 2, lambda a, b: max(0, min(a, b)), signed=True, target="sm_90a"),
        _case("max.relu.s32", 32, 2, lambda a, b: max(0, a, b), signed=True, target="sm_90a"),
        _case(
            "add.cc.u32 addc.u32",
            64,
            2,
            lambda a, b: a + b,
            code="mov.b64 {%r0, %r1}, %x0; mov.b64 {%r2, %r3}, %x1; add.cc.u32 %r4, %r0, %r2; "
            "addc.u32 %r5, %r1, %r3; mov.b64 %y, {%r4, %r5};",
        ),
        _case(
            "sub.cc.u32 subc.u32",
            64,
            2,
            lambda a, b: a - b,
            code="mov.b64 {%r0, %r1}, %x0; mov.b64 {%r2, %r3}, %x1; sub.cc.u32 %r4, %r0, %r2; "
            "subc.u32 %r5, %r1, %r3; mov.b64 %y, {%r4, %r5};",
        ),
    ]
    for table in (0x00, 0x1E, 0x80, 0x96, 0xCA, 0xE8, 0xFE):
        code = f"lop3.b32 %y, %x0, %x1, %x2, {table:#x};"
        cases.append(
            _case("lop3.b32", 32, 3, lambda a, b, c, t=table: _lop3(a, b, c, t), code=code, name=f"lop3.b32 {table:#x}")
        )
    comparisons = {
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
    }
    for bits in (16, 32, 64):
        for kind, signed in ((f"s{bits}", True), (f"u{bits}", False)):
            for comparison, function in comparisons.items():
                opcode = f"setp.{comparison}.{kind}"
                code = f"{opcode} %p0, %x0, %x1; selp.b32 %y, 1, 0, %p0;"
                cases.append(
                    _case(
                        opcode, bits, 2, lambda a, b, f=function: int(f(a, b)), signed=signed, code=code, result_bits=32
                    )
                )
    return cases


CASES = _cases()
