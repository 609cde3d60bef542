"""tcgen05.mma on panelled tiles: descriptors are compile-time constants, one elected thread issues a whole product.

D (m x n, fp32, tensor memory) = A (m x k) B^T (n x k). A is in shared or tensor memory, B in shared memory. Bit fields:
PTX ISA, "tcgen05: matrix descriptors" and "instruction descriptor".
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.constant import Constant
from ..pipeline.smem import PANEL_ROW_BYTES, SWIZZLE_ALIGN, SmemMap, Tile
from ..runtime.dsl import cute, cutlass, ir, llvm, nvvm, vector
from .tensor_memory import pointer

if TYPE_CHECKING:
    from cutlass import Int32

COLUMNS_PER_MMA = 8  # of tensor memory that an instruction reads of A
# Scales of blocks of 32 numbers, in chunks: rows, blocks and bytes of a chunk, and its columns of tensor memory.
CHUNK_ROWS, CHUNK_BLOCKS, CHUNK_BYTES, CHUNK_COLUMNS = 128, 4, 512, 4


def k_per_mma(bits: int) -> int:
    """Reduction elements of an instruction, for operands of so many bits."""
    return 256 // bits


def _is_second(dtype: type[cutlass.Numeric]) -> bool:
    """Whether a type has the code 1 of its width; float16 and e4m3 have 0."""
    return dtype in (cutlass.BFloat16, cutlass.Float8E5M2)


class Major(enum.IntEnum):
    """Major axis of an operand. K: the reduction runs along a tile's columns (contiguous); MN: along its rows."""

    K = 0
    MN = 1


@dataclass(frozen=True, slots=True)
class SmemOperand(Constant):
    """Shared-memory operand: a panelled tile and its major axis. Descriptors count addresses in units of 16 bytes."""

    tile: Tile
    major: Major

    @property
    def constant_bits(self) -> int:
        """Descriptor without the address: strides of 8-row groups and panels, version 1, 128-byte swizzle."""
        leading = self.tile.panel_bytes if self.major is Major.MN else 16  # K-major ignores it
        return (leading >> 4) << 16 | (SWIZZLE_ALIGN >> 4) << 32 | 1 << 46 | 2 << 61

    def step(self, k: int) -> int:
        """Descriptor offset of the reduction elements of the k-th instruction."""
        first = k * k_per_mma(self.tile.bits)
        if self.major is Major.MN:
            return first * PANEL_ROW_BYTES >> 4
        panel, column = divmod(first, self.tile.panel_columns)
        return (panel * self.tile.panel_bytes + column * self.tile.bits // 8) >> 4

    def at(self, address: Int32) -> Int32:
        """Low 32 bits of the descriptor of a tile at a shared-memory address. The high 32 bits are constant."""
        return cutlass.Int32((address >> 4) & 0x3FFF) | cutlass.Int32(self.constant_bits & 0xFFFFFFFF)

    def descriptor(self, low: Int32, k: int):
        """Descriptor (an i64 value) of the reduction elements of the k-th instruction; `low` is from `at`."""
        return _descriptor(low + self.step(k), self.constant_bits >> 32)


def first_word(smem: SmemMap, region: str, tile: Tile, major: Major) -> Int32:
    """Low descriptor word of a region's first tile, the same in all threads of a warp."""
    return cute.arch.make_warp_uniform(SmemOperand(tile, major).at(smem.address(region)))


def _descriptor(low: Int32, high: int):
    """64-bit value of two halves."""
    i32x2 = ir.VectorType.get([2], cutlass.Int32.mlir_type)
    pair = vector.from_elements(i32x2, [low.ir_value(), cutlass.Int32(high).ir_value()])
    return llvm.bitcast(cutlass.Int64.mlir_type, pair)


@dataclass(frozen=True, slots=True)
class Umma(Constant):
    """Shape of one product: m rows, n columns (a multiple of 16), k reduced `k_per_mma` at a time.

    With `ctas` = 2 a CTA pair computes the product. Each CTA holds half of A's rows and half of B's rows, and gets its
    own rows of D; both use the same shared and tensor memory addresses. At m = 256 a lane is a row. At m = 128 lanes
    0 to 63 hold the first half of D's columns, lanes 64 to 127 the second half.
    """

    dtype: type[cutlass.Numeric]
    n: int
    k: int
    b: SmemOperand
    a: SmemOperand | None = None  # None: A is in tensor memory, packed into 32-bit columns
    m: int = 128
    ctas: int = 1
    a_dtype: type[cutlass.Numeric] | None = None  # of A, if not `dtype`
    is_scaled: bool = False  # blocks of 32 numbers of A's and B's rows have scales in tensor memory

    @property
    def instruction(self) -> int:
        """32-bit instruction descriptor: fp32 accumulator, operand type and major axes, n and m. That of a scaled
        product has the type of scales, and m in other bits; `issue` adds the block of an instruction."""
        a_format, b_format = (_is_second(dtype) for dtype in (self.a_dtype or self.dtype, self.dtype))
        a_major = Major.K if self.a is None else self.a.major
        common = a_format << 7 | b_format << 10 | a_major << 15 | self.b.major << 16 | self.n >> 3 << 17
        return common | (1 << 23 | self.m >> 7 << 27 if self.is_scaled else 1 << 4 | self.m >> 4 << 24)

    @property
    def steps(self) -> int:
        return -(-self.k // k_per_mma(self.dtype.width))

    @property
    def kind(self) -> nvvm.Tcgen05MMAKind:
        return nvvm.Tcgen05MMAKind.F8F6F4 if self.dtype.width == 8 else nvvm.Tcgen05MMAKind.F16

    def issue(self, d, a, b, accumulate, steps: range | None = None, scales: tuple | None = None) -> None:
        """Issue D (+)= A B^T. One elected thread calls it.

        Args:
            d: tensor-memory address of D.
            a: low descriptor word of A from `SmemOperand.at`, or A's tensor-memory address.
            b: low descriptor word of B from `SmemOperand.at`.
            accumulate: bool or Boolean; False overwrites D at the first step.
            steps: instructions to issue; default all.
            scales: of a scaled product, tensor-memory addresses of the scales of A and of B.
        """
        for k in range(self.steps) if steps is None else steps:
            accumulates = cutlass.Boolean(accumulate) if k == 0 else cutlass.Boolean(True)
            a_k = pointer(a + k * COLUMNS_PER_MMA) if self.a is None else self.a.descriptor(a, k)
            operands = cta_group(self.ctas), pointer(d), a_k, self.b.descriptor(b, k)
            if scales is None:
                nvvm.tcgen05_mma(
                    self.kind, *operands, cutlass.Int32(self.instruction).ir_value(), accumulates.ir_value()
                )
            else:  # an instruction reduces one block
                chunk, block = divmod(k, CHUNK_BLOCKS)
                instruction = cutlass.Int32(self.instruction | block << 4 | block << 29).ir_value()
                addresses = (pointer(x + chunk * CHUNK_COLUMNS) for x in scales)
                kind = nvvm.Tcgen05MMAKind.MXF8F6F4
                nvvm.tcgen05_mma_block_scale(kind, *operands, instruction, accumulates.ir_value(), *addresses)


def copy_chunk(source: Int32, address: Int32) -> None:
    """One thread: copy a chunk of scales from shared memory, where it is dense, to its columns of tensor memory, into
    the lanes of each warp. A product that the same thread issues later reads the copy (PTX ISA, "tcgen05: pipelined
    instructions")."""
    group = 8 * 16  # bytes of 8 rows
    low = cutlass.Int32((source >> 4) & 0x3FFF) | 1 << 16
    descriptor = _descriptor(low, group >> 4 | 1 << 14)
    shape = nvvm.Tcgen05CpShape.SHAPE_32x128b
    multicast = nvvm.Tcgen05CpMulticast.WARPX4
    nvvm.tcgen05_cp(shape, pointer(address), descriptor, group=cta_group(1), multicast=multicast)


def cta_group(ctas: int):
    """cta_group qualifier of tcgen05 instructions; all of them in a kernel must use the same one."""
    return nvvm.CTAGroupKind.CTA_2 if ctas == 2 else nvvm.CTAGroupKind.CTA_1
