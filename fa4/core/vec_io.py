"""Vector loads and stores of up to four 32-bit words, and packing of values into words."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, vector


def bits(value: Float32) -> Int32:
    """Return the 32 bits of a float."""
    return Int32(llvm.bitcast(Int32.mlir_type, value.ir_value()))


def as_float(word: Int32) -> Float32:
    """Return the float of these 32 bits."""
    return Float32(llvm.bitcast(Float32.mlir_type, word.ir_value()))


def pack_half(low: Float32, high: Float32, dtype: type[cutlass.Numeric]) -> Int32:
    """Round two floats to `dtype` and pack them, `low` in the low half: one cvt.rn.{bf16x2,f16x2}.f32."""
    kind = ir.VectorType.get([2], dtype.mlir_type)
    pair = vector.from_elements(ir.VectorType.get([2], Float32.mlir_type), [low.ir_value(), high.ir_value()])
    halves = arith.truncf(kind, pair)
    return Int32(llvm.bitcast(Int32.mlir_type, halves))


def pack_word(values: list[Float32], dtype: type[cutlass.Numeric]) -> Int32:
    """Round two floats to 16 bits, or four to e4m3 or e5m2, and pack them, the first in the lowest bits."""
    if dtype.width == 16:
        return pack_half(values[0], values[1], dtype)
    name = "e4m3" if dtype is cutlass.Float8E4M3FN else "e5m2"
    return cute.arch.inline_ptx(
        f"""{{
        .reg .b16 low, high;
        cvt.rn.satfinite.{name}x2.f32 low, {{$r1}}, {{$r0}};
        cvt.rn.satfinite.{name}x2.f32 high, {{$r3}}, {{$r2}};
        mov.b32 {{$w0}}, {{low, high}};
        }}""",
        write_only_types=[Int32],
        read_only_args=values,
    )


def pack_e2m1(values: list[Float32]) -> Int32:
    """Round eight floats to e2m1 and pack them, the first in the lowest bits."""
    parts = "".join(f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}};\n" for i in range(4))
    return cute.arch.inline_ptx(
        f"{{\n.reg .b8 b0, b1, b2, b3;\n{parts}mov.b32 {{$w0}}, {{b0, b1, b2, b3}};\n}}",
        write_only_types=[Int32],
        read_only_args=values,
    )


def pack_f16x2_as_e4m3(low: Int32, high: Int32) -> Int32:
    """Round two pairs of float16 numbers to e4m3 and pack them, the first in the lowest bits."""
    return cute.arch.inline_ptx(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f16x2 low, {$r0};
        cvt.rn.satfinite.e4m3x2.f16x2 high, {$r1};
        mov.b32 {$w0}, {low, high};
        }""",
        write_only_types=[Int32],
        read_only_args=[low, high],
    )


def add_f16x2(a: Int32, b: Int32) -> Int32:
    """Add two pairs of float16 numbers."""
    return cute.arch.inline_ptx("add.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[a, b])


def floats_of_f16x2(pair: Int32) -> tuple[Float32, Float32]:
    """Return a pair of float16 numbers as floats."""
    low, high = cute.arch.inline_ptx(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, {$r0};
        cvt.f32.f16 {$w0}, low;
        cvt.f32.f16 {$w1}, high;
        }""",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )
    return low, high


class Packed:
    """Floats rounded to 16 bits, e4m3 or e5m2, packed into words as soon as one is full, the first in its lowest bits:
    later, there may be no registers for all of them."""

    def __init__(self, dtype: type[cutlass.Numeric]):
        self.dtype, self.words = dtype, list[Int32]()
        self._values = list[Float32]()

    def add(self, *values: Float32) -> None:
        for value in values:
            self._values.append(value)
            if len(self._values) * self.dtype.width == 32:
                self.words.append(pack_word(self._values, self.dtype))
                self._values = []


def rounded(x: Float32, dtype: type[cutlass.Numeric]) -> Float32:
    """Round a float to `dtype`, to a finite number if that is e4m3."""
    if dtype.width == 16:
        return Float32(dtype(x))
    return cute.arch.inline_ptx(
        """{
        .reg .b16 code, low, high;
        .reg .b32 pair;
        cvt.rn.satfinite.e4m3x2.f32 code, {$r0}, {$r0};
        cvt.rn.f16x2.e4m3x2 pair, code;
        mov.b32 {low, high}, pair;
        cvt.f32.f16 {$w0}, low;
        }""",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def store_vec(pointer: cute.Pointer, packed: list[Int32]) -> None:
    """Store up to four words with one instruction; the address is aligned to their size."""
    kind = ir.VectorType.get([len(packed)], Int32.mlir_type)
    values = vector.from_elements(kind, [word.ir_value() for word in packed])
    llvm.store(values, pointer.llvm_ptr, alignment=4 * len(packed))


def load_vec(pointer: cute.Pointer, count: int) -> list[Int32]:
    """Load `count` words with one instruction; the address is aligned to their size."""
    loaded = llvm.load(ir.VectorType.get([count], Int32.mlir_type), pointer.llvm_ptr, alignment=4 * count)
    return [Int32(vector.extract(loaded, [], [i])) for i in range(count)]


def load_vec_through_l2(pointer: cute.Pointer) -> list[Int32]:
    """Load four words of global memory with one instruction, and prefetch the 256 bytes around them into L2; the
    address is aligned to 16 bytes. The memory does not change while the kernel runs."""
    return cute.arch.inline_ptx(
        "ld.global.L2::256B.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[pointer.toint()],
    )


def add_floats(pointer: cute.Pointer, values: list[Float32]) -> None:
    """Add two or four floats to global memory, each addition atomic (sm_90); the address is aligned to their size."""
    registers = ", ".join(f"{{$r{i}}}" for i in range(1, 1 + len(values)))
    cute.arch.inline_ptx(
        f"red.relaxed.gpu.global.add.v{len(values)}.f32 [{{$r0}}], {{ {registers} }};",
        read_only_args=[pointer.toint(), *values],
    )


def add_unless_zero(pointer: cute.Pointer, value: Float32) -> None:
    """Add to a float in global memory, atomically. If `value` is 0, the address may be invalid."""
    cute.arch.inline_ptx(
        """{
        .reg .pred there;
        setp.neu.f32 there, {$r1}, 0f00000000;
        @there red.relaxed.gpu.global.add.f32 [{$r0}], {$r1};
        }""",
        read_only_args=[pointer.toint(), value],
    )


def load_halves(pointer: cute.Pointer, dtype: type[cutlass.Numeric]) -> list[Float32]:
    """Load eight 16-bit values with one instruction, as floats."""
    loaded = llvm.load(ir.VectorType.get([8], dtype.mlir_type), pointer.llvm_ptr, alignment=16)
    wide = arith.extf(ir.VectorType.get([8], Float32.mlir_type), loaded)
    return [Float32(vector.extract(wide, [], [i])) for i in range(8)]


def load_floats(pointer: cute.Pointer, count: int) -> list[Float32]:
    """Load `count` floats with one instruction; the address is aligned to their size."""
    kind = ir.VectorType.get([count], Float32.mlir_type)
    loaded = llvm.load(kind, pointer.llvm_ptr, alignment=4 * count)
    return [Float32(vector.extract(loaded, [], [i])) for i in range(count)]
