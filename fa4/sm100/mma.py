"""tcgen05.mma on panelled tiles: descriptors worked out at compile time, one elected thread issues a whole product.

D (m x n, fp32, tensor memory) = A (m x k) B^T (n x k), A from shared or tensor memory, B from shared memory. For the
bit fields see the PTX ISA, "tcgen05: matrix descriptors" and "instruction descriptor".
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm, vector

from ..core.constant import Constant
from ..pipeline.smem import PANEL_ROW_BYTES, SWIZZLE_ALIGN, Tile
from . import tmem

K_PER_MMA = 16  # reduction elements of one instruction, 16-bit operands


class Major(enum.IntEnum):
    """Which way an operand lies: K = the reduction is contiguous (a tile's columns), MN = the rows reduce."""

    K = 0
    MN = 1


@dataclass(frozen=True, slots=True)
class SmemOperand(Constant):
    """How the matrix unit reads a panelled tile. Descriptor addresses count 16-byte units."""

    tile: Tile
    major: Major

    @property
    def constant_bits(self) -> int:
        """The descriptor without its address: offsets between 8-row groups and panels, version 1, 128-byte swizzle."""
        leading = self.tile.panel_bytes if self.major is Major.MN else 16  # K-major ignores it
        return (leading >> 4) << 16 | (SWIZZLE_ALIGN >> 4) << 32 | 1 << 46 | 2 << 61

    def step(self, k: int) -> int:
        """What the k-th group of 16 reduction elements adds to the descriptor."""
        if self.major is Major.MN:
            return k * K_PER_MMA * PANEL_ROW_BYTES >> 4
        panel, column = divmod(k * K_PER_MMA, self.tile.panel_columns)
        return (panel * self.tile.panel_bytes + column * self.tile.bits // 8) >> 4

    def at(self, address) -> Int32:
        """The low word of the descriptor of the tile at a shared-memory address; the high word is constant."""
        return Int32((address >> 4) & 0x3FFF) | Int32(self.constant_bits & 0xFFFFFFFF)

    def descriptor(self, low: Int32, k: int):
        """The descriptor (an i64 value) of the k-th group of 16 reduction elements."""
        words = ir.VectorType.get([2], Int32.mlir_type)
        high = Int32(self.constant_bits >> 32)
        pair = vector.from_elements(words, [(low + self.step(k)).ir_value(), high.ir_value()])
        return llvm.bitcast(Int64.mlir_type, pair)


@dataclass(frozen=True, slots=True)
class Umma(Constant):
    """One product shape: m rows, n columns (a multiple of 16), k reduced 16 at a time.

    With `ctas` = 2 a pair of CTAs computes it: each has half of A's rows and half of B's, and gets its rows of D. Their
    shared memory and tensor memory are addressed alike. At m = 256 a lane is a row; at m = 128 the second half of D's
    columns lies in lanes 64 to 127, beside the first.
    """

    dtype: type[cutlass.Numeric]
    n: int
    k: int
    b: SmemOperand
    a: SmemOperand | None = None  # None: A lies in tensor memory, 16-bit pairs packed into 32-bit columns
    m: int = 128
    ctas: int = 1

    @property
    def instruction(self) -> int:
        """The 32-bit instruction descriptor: fp32 accumulator, operand type and majors, n and m."""
        operand = 1 if self.dtype is cutlass.BFloat16 else 0
        a_major = Major.K if self.a is None else self.a.major
        formats = 1 << 4 | operand << 7 | operand << 10
        return formats | a_major << 15 | self.b.major << 16 | self.n >> 3 << 17 | self.m >> 4 << 24

    @property
    def steps(self) -> int:
        return -(-self.k // K_PER_MMA)

    def issue(self, d, a, b, accumulate, steps: range | None = None) -> None:
        """Issue D (+)= A B^T; call from one thread, within an elected region.

        Args:
            d: tensor-memory address of D.
            a: A's place, as `SmemOperand.at` gives it, or its tensor-memory address.
            b: B's place, as `SmemOperand.at` gives it.
            accumulate: False overwrites D at the first step; a bool or Boolean.
            steps: which groups of 16 reduction elements; all of them by default.
        """
        for k in range(self.steps) if steps is None else steps:
            keep = Boolean(accumulate) if k == 0 else Boolean(True)
            a_k = tmem.pointer(a + k * K_PER_MMA // 2) if self.a is None else self.a.descriptor(a, k)
            nvvm.tcgen05_mma(
                nvvm.Tcgen05MMAKind.F16,
                cta_group(self.ctas),
                tmem.pointer(d),
                a_k,
                self.b.descriptor(b, k),
                Int32(self.instruction).ir_value(),
                keep.ir_value(),
            )


def cta_group(ctas: int):
    """The qualifier of tcgen05 instructions: every one of a kernel has the same."""
    return nvvm.CTAGroupKind.CTA_2 if ctas == 2 else nvvm.CTAGroupKind.CTA_1
