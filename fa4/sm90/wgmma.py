"""wgmma on panelled tiles: a warpgroup computes D (64 x n, fp32, registers) (+)= A (64 x k) B^T (n x k).

A and B are 16-bit, or both e4m3. B is in shared memory; A is in shared memory or registers. Operands are created once,
outside loops; an index selects the stage. Do not touch D or the registers of A between `issue` and `wait`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core.constant import Constant
from ..pipeline.smem import Tile
from ..runtime.dsl import cute, cutlass, nvgpu, warpgroup

if TYPE_CHECKING:
    from cutlass.cute.nvgpu.warpgroup import MmaF8Op, MmaF16BF16Op

ROWS = 64  # of D and A, for one warpgroup
K_PER_MMA = 16  # reduction elements of 16 bits per instruction


class Major(enum.Enum):
    """Memory layout of an operand: K = the reduction dimension is contiguous (columns), MN = the rows are reduced."""

    K = "K"
    MN = "MN"

    @property
    def mode(self) -> nvgpu.OperandMajorMode:
        """As the DSL names it."""
        return getattr(nvgpu.OperandMajorMode, self.name)


@dataclass(frozen=True, slots=True)
class SmemOperand(Constant):
    """Shared-memory operand: a ring of panelled tiles, `stage_bytes` apart. An operand may be part of a tile; it then
    starts at the given pointer, at a multiple of 8 rows and in the first column of a panel."""

    tile: Tile
    major: Major
    stages: int = 1
    stage_bytes: int = 0

    def matrix(self, pointer: cute.Pointer, extent: int) -> cute.Tensor:
        """Return the tensor (m or n, k, stages) at `pointer`. extent: rows (K-major) or columns (MN-major) of the tile
        that are not reduced."""
        rows, width = self.tile.rows, self.tile.panel_columns
        panels = (width, self.tile.panels)
        of_panels = (1, rows * width)
        shape: tuple
        stride: tuple
        if self.major is Major.K:
            shape, stride = (extent, panels), (width, of_panels)
        else:
            shape, stride = ((width, -(-extent // width)), rows), (of_panels, width)
        between = self.stage_bytes * 8 // self.tile.bits
        layout = cute.make_layout((*shape, self.stages), stride=(*stride, between))
        return cute.make_tensor(cute.recast_ptr(pointer, cute.make_swizzle(3, 4, 3)), layout)

    def padded(self, extent: int) -> int:
        """Round `extent` up to whole panels if it counts columns: same descriptors, simple layout."""
        width = self.tile.panel_columns
        return extent if self.major is Major.K else -(-extent // width) * width


@dataclass(frozen=True, slots=True)
class Wgmma(Constant):
    """One product shape: n columns (a multiple of 8, at most 256), k in steps of 16, or 32 of e4m3. a = None: A is in
    registers. Of e4m3, both operands are K-major."""

    dtype: type[cutlass.Numeric]
    n: int
    k: int
    b: SmemOperand
    a: SmemOperand | None = None

    @property
    def k_per_mma(self) -> int:
        return K_PER_MMA * 16 // self.dtype.width

    @property
    def steps(self) -> int:
        return -(-self.k // self.k_per_mma)

    def accumulator(self) -> cute.Tensor:
        """Return D, not initialised; for its layout see `fragment`."""
        return cute.make_rmem_tensor(((2, 2, self.n // 8), 1, 1), cutlass.Float32)

    def a_registers(self) -> cute.Tensor:
        """Return A as a register tensor; of 16 bits, element i is element i of a 64 x k accumulator."""
        return cute.make_rmem_tensor(((32 // self.dtype.width, 2, 2), 1, self.steps), self.dtype)

    def a_at(self, pointer: cute.Pointer) -> cute.Tensor:
        """Return the descriptors (.., .., step, stage) of A for 64 rows at `pointer`, a pointer to its element type."""
        part = self._tiled(self.b.padded(self.n)).get_slice(0)
        return part.make_fragment_A(part.partition_A(self.a.matrix(pointer, ROWS)))

    def b_at(self, pointer: cute.Pointer) -> cute.Tensor:
        """Return the descriptors (.., .., step, stage) of B for n rows at `pointer`, a pointer to its element type."""
        part = self._tiled(self.b.padded(self.n)).get_slice(0)
        return part.make_fragment_B(part.partition_B(self.b.matrix(pointer, self.n)))

    def issue(
        self, d: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate, steps: range | None = None, b_first: int = 0
    ) -> None:
        """Whole warpgroup: start D (+)= A B^T and commit it as one wgmma group.

        Args:
            d: from `accumulator`.
            a: from `a_registers`, or a stage of `a_at`.
            b: a stage of `b_at`.
            accumulate: False overwrites D in the first step; a bool or Boolean.
            steps: which groups of `k_per_mma` reduction elements; default: all. b_first: group of B that meets the
                first of A.
        """
        warpgroup.fence()
        atom = cute.make_mma_atom(self._op(self.n))
        atom.set(warpgroup.Field.ACCUMULATE, accumulate)
        for step in range(self.steps) if steps is None else steps:
            cute.gemm(atom, d, a[None, None, step], b[None, None, b_first + step], d)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def _op(self, n: int) -> MmaF16BF16Op | MmaF8Op:
        sources, sums = warpgroup.OperandSource, cutlass.Float32
        source, a_major = (sources.RMEM, Major.K) if self.a is None else (sources.SMEM, self.a.major)
        shape, majors = (ROWS, n, self.k_per_mma), (a_major.mode, self.b.major.mode)
        if self.dtype.width == 8:
            return warpgroup.MmaF8Op(self.dtype, self.dtype, sums, shape, source, *majors)
        return warpgroup.MmaF16BF16Op(self.dtype, sums, shape, source, *majors)

    def _tiled(self, n: int) -> cute.TiledMma:
        return cute.make_tiled_mma(cute.make_mma_atom(self._op(n)), (1, 1, 1))
