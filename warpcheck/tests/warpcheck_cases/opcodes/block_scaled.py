"""mma.sync of floats of 8 bits and less, with and without block scaling.

Elements and scale factors are few small numbers, whose scaled products have exact sums: every bit is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from warpcheck_cases.opcodes.case import Case, Inputs, element_address, entry
from warpcheck_cases.opcodes.matrix import ACCUMULATOR, fragment_of_a, fragment_of_b

_CONSUMER = ("sm_120a", "sm_121a")
# Exponent and mantissa bits; the largest magnitude of an operand, so that sums stay exact.
_FORMATS = {"e4m3": (4, 3, 4), "e5m2": (5, 2, 4), "e2m3": (2, 3, 4), "e3m2": (3, 2, 4), "e2m1": (2, 1, 6)}
_FACTORS = {"ue8m0": np.arange(125, 130), "ue4m3": np.array([0x30, 0x38, 0x3C, 0x40, 0x44])}  # ue4m3: 0.5, 1, 1.5, 2, 3


def _values(name: str) -> np.ndarray:
    """The values of all codes of a float of 8 bits or less; infinity and NaN as if they were numbers."""
    exponent_bits, mantissa_bits, _ = _FORMATS[name]
    code = np.arange(2 << (exponent_bits + mantissa_bits))
    exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1)
    fraction = (code & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    magnitude = np.ldexp(fraction + (exponent > 0), np.maximum(exponent, 1) - bias)
    return np.where(code >> (exponent_bits + mantissa_bits), -magnitude, magnitude)


def _codes(name: str) -> np.ndarray:
    """Codes of multiples of 1/2 up to the format's limit for operands."""
    values = _values(name)
    return np.flatnonzero((values % 0.5 == 0) & (np.abs(values) <= _FORMATS[name][2]))


def _factor(name: str, code: np.ndarray) -> np.ndarray:
    return np.ldexp(1.0, code.astype(np.int64) - 127) if name == "ue8m0" else _values("e4m3")[code]


@dataclass(frozen=True)
class _Scaling:
    """Modifiers and operands of block scaling. written: scale_vec is in the opcode."""

    kind: str
    vector: int
    factor: str
    byte: tuple[int, int]
    thread: tuple[int, int]
    written: bool = True

    @property
    def modifiers(self) -> str:
        return f".kind::{self.kind}.block_scale" + (f".scale_vec::{self.vector}X" if self.written else "")

    @property
    def operands(self) -> str:
        pairs = [f"{register}, {{{b}, {t}}}" for register, b, t in zip(("%r20", "%r21"), self.byte, self.thread)]
        return ", " + ", ".join(pairs)

    def factors_of_a(self, words: np.ndarray) -> np.ndarray:
        """(16, vector). A quad's thread pair `thread` has row g in its first thread, row g + 8 in its second."""
        pair = words.view(np.uint8).reshape(8, 2, 2, 4)[:, self.thread[0]]
        return self._selected(pair.transpose(1, 0, 2).reshape(16, 4), self.byte[0])

    def factors_of_b(self, words: np.ndarray) -> np.ndarray:
        """(8, vector). Thread `thread` of a quad has column g."""
        return self._selected(words.view(np.uint8).reshape(8, 4, 4)[:, self.thread[1]], self.byte[1])

    def _selected(self, codes: np.ndarray, byte: int) -> np.ndarray:
        return _factor(self.factor, codes[:, byte : byte + self.vector])


def _pack(name: str, codes: np.ndarray, dense: bool) -> np.ndarray:
    """Codes (lane, i) as 32-bit words: in bytes, e2m1 in bits 2 to 5, or dense in halves of bytes."""
    if dense:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    elif name == "e2m1":
        codes = codes << 2
    return np.ascontiguousarray(codes.astype(np.uint8)).view(np.uint32).reshape(-1)


def _unpack(name: str, words: np.ndarray, dense: bool) -> np.ndarray:
    bytes_ = words.view(np.uint8).reshape(32, -1)
    if dense:
        codes = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(32, -1)
    else:
        codes = bytes_ >> 2 if name == "e2m1" else bytes_
    return _values(name)[codes]


def _mma(a_type: str, b_type: str, scaling: _Scaling | None) -> Case:
    dense = scaling is not None and scaling.kind != "mxf8f6f4"
    k, per_register = (64, 8) if dense else (32, 4)
    a, b = fragment_of_a(k, per_register), fragment_of_b(k, per_register)

    def inputs(rng: np.random.Generator) -> Inputs:
        left, right = rng.choice(_codes(a_type), (16, k)), rng.choice(_codes(b_type), (k, 8))
        start = ACCUMULATOR.take(rng.integers(-100, 100, (16, 8))).astype(np.float32)
        arrays = (_pack(a_type, a.take(left), dense), _pack(b_type, b.take(right), dense), start.reshape(-1))
        if scaling is None:
            return (*arrays[:2], arrays[2].view(np.uint32))
        # All bytes of all threads hold factors; those that are not selected have to have no effect.
        scales = [rng.choice(_FACTORS[scaling.factor], (32, 4)).astype(np.uint8) for _ in range(2)]
        return (*arrays[:2], arrays[2].view(np.uint32), *(s.view(np.uint32).reshape(-1) for s in scales))

    def expected(left: np.ndarray, right: np.ndarray, start: np.ndarray, *scales: np.ndarray) -> np.ndarray:
        x = a.put(_unpack(a_type, left, dense), (16, k))
        y = b.put(_unpack(b_type, right, dense), (k, 8))
        if scaling is not None:
            x = x * np.repeat(scaling.factors_of_a(scales[0]), k // scaling.vector, 1)
            y = y * np.repeat(scaling.factors_of_b(scales[1]), k // scaling.vector, 1).T
        z = ACCUMULATOR.put(start.view(np.float32).astype(np.float64).reshape(32, 4), (16, 8))
        return np.ascontiguousarray(ACCUMULATOR.take(x @ y + z).astype(np.float32)).view(np.uint32)

    modifiers = ".kind::f8f6f4" if scaling is None else scaling.modifiers
    factor = "" if scaling is None else f".{scaling.factor}"
    opcode = f"mma.sync.aligned.m16n8k{k}.row.col{modifiers}.f32.{a_type}.{b_type}.f32{factor}"
    code = [element_address("%in0", "%d0", 16), "  ld.global.v4.b32 {%r0, %r1, %r2, %r3}, [%d0];"]
    code += [element_address("%in1", "%d0", 8), "  ld.global.v2.b32 {%r4, %r5}, [%d0];"]
    code += [element_address("%in2", "%d0", 16), "  ld.global.v4.f32 {%f0, %f1, %f2, %f3}, [%d0];"]
    if scaling is not None:
        for i in range(2):
            code += [element_address(f"%in{3 + i}", "%d0", 4), f"  ld.global.b32 %r{20 + i}, [%d0];"]
    fragments = "{%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, {%r4, %r5}, {%f0, %f1, %f2, %f3}"
    code += [
        f"  {opcode} {fragments}{scaling.operands if scaling else ''};",
        element_address("%out", "%d0", 16),
        "  st.global.v4.f32 [%d0], {%f0, %f1, %f2, %f3};",
    ]
    ptx = entry("sm_120a", "\n".join(code), pointers=5 if scaling else 3)
    if scaling is not None and (scaling.vector, scaling.factor) == (4, "ue8m0"):
        ptx = ptx.replace(".version 8.8", ".version 9.1", 1)
    name = opcode if scaling is None else f"{opcode}, bytes {scaling.byte}, threads {scaling.thread}"
    return Case(name, ptx, inputs, expected, target="sm_120a", chips=_CONSUMER)


_Pair = tuple[int, int]  # of A and of B


def _scaled8(a_type: str, b_type: str, byte: _Pair, thread: _Pair, written: bool = True) -> Case:
    return _mma(a_type, b_type, _Scaling("mxf8f6f4", 1, "ue8m0", byte, thread, written))


def _scaled4(kind: str, vector: int, factor: str, byte: _Pair, thread: _Pair, written: bool = True) -> Case:
    return _mma("e2m1", "e2m1", _Scaling(kind, vector, factor, byte, thread, written))


CASES = [
    *(_mma(a_type, b_type, None) for a_type, b_type in (("e4m3", "e2m1"), ("e3m2", "e2m3"), ("e2m1", "e5m2"))),
    *(_scaled8("e4m3", "e4m3", (i, 3 - i), (i % 2, i)) for i in range(4)),
    _scaled8("e5m2", "e5m2", (0, 1), (1, 3)),
    _scaled8("e2m3", "e2m3", (1, 0), (0, 2)),
    _scaled8("e3m2", "e3m2", (2, 3), (1, 0)),
    _scaled8("e2m1", "e2m1", (3, 2), (0, 1)),
    _scaled8("e4m3", "e5m2", (0, 0), (0, 0), written=False),
    _scaled8("e2m1", "e4m3", (2, 1), (1, 2)),
    _scaled8("e3m2", "e2m1", (1, 1), (1, 1)),
    _scaled4("mxf4", 2, "ue8m0", (0, 2), (1, 3)),
    _scaled4("mxf4", 2, "ue8m0", (2, 0), (0, 2), written=False),
    _scaled4("mxf4nvf4", 2, "ue8m0", (2, 2), (1, 1)),
    _scaled4("mxf4nvf4", 4, "ue4m3", (0, 0), (0, 0)),
    _scaled4("mxf4nvf4", 4, "ue4m3", (0, 0), (1, 3)),
    _scaled4("mxf4nvf4", 4, "ue8m0", (0, 0), (1, 2)),
]
