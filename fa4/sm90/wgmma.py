"""wgmma on panelled tiles: a warpgroup computes D (64 x n, fp32, registers) (+)= A (64 x k) B^T (n x k).

B lies in shared memory, A there too or in registers, 16-bit both. Operands are made once, outside of loops; an index
into them picks a stage. Nothing of D and of A's registers may be touched between `issue` and `wait`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import Field, MmaF16BF16Op, OperandSource

from ..core.constant import Constant
from ..core.vec_io import bits
from ..pipeline.smem import Tile

ROWS = 64  # of D and A: what one warpgroup computes
K_PER_MMA = 16  # reduction elements of one instruction


class Major(enum.Enum):
    """Which way an operand lies: K = the reduction is contiguous (a tile's columns), MN = the rows reduce."""

    K = OperandMajorMode.K
    MN = OperandMajorMode.MN


@dataclass(frozen=True, slots=True)
class SmemOperand(Constant):
    """How the matrix unit reads panelled tiles that lie `stage_bytes` apart, one per stage.

    An operand may be a part of a tile: it begins where the pointer says, at a multiple of 8 rows and in the first
    column of a panel.
    """

    tile: Tile
    major: Major
    stages: int = 1
    stage_bytes: int = 0

    def matrix(self, pointer: cute.Pointer, extent: int) -> cute.Tensor:
        """(m or n, k, stages) over the bytes at `pointer`, `extent` being how many of the tile's rows (K-major) or
        columns (MN-major) are not reduced."""
        rows, width = self.tile.rows, self.tile.panel_columns
        panels = (width, self.tile.panels)
        of_panels = (1, rows * width)
        if self.major is Major.K:
            shape, stride = (extent, panels), (width, of_panels)
        else:
            shape, stride = ((width, -(-extent // width)), rows), (of_panels, width)
        between = self.stage_bytes * 8 // self.tile.bits
        layout = cute.make_layout((*shape, self.stages), stride=(*stride, between))
        return cute.make_tensor(cute.recast_ptr(pointer, cute.make_swizzle(3, 4, 3)), layout)

    def padded(self, extent: int) -> int:
        """`extent` in whole panels where it counts columns: the descriptors are the same, and the layout is simple."""
        width = self.tile.panel_columns
        return extent if self.major is Major.K else -(-extent // width) * width


@dataclass(frozen=True, slots=True)
class Wgmma(Constant):
    """One product shape: n columns (a multiple of 8, at most 256), k reduced 16 at a time; a = None: A in registers."""

    dtype: type[cutlass.Numeric]
    n: int
    k: int
    b: SmemOperand
    a: SmemOperand | None = None

    @property
    def steps(self) -> int:
        return -(-self.k // K_PER_MMA)

    def accumulator(self) -> cute.Tensor:
        """D: see `fragment` for which thread has what."""
        return cute.make_rmem_tensor(((2, 2, self.n // 8), 1, 1), Float32)

    def a_registers(self) -> cute.Tensor:
        """A in registers: element i is the one that an accumulator 64 x k has as element i."""
        return cute.make_rmem_tensor(((2, 2, 2), 1, self.steps), self.dtype)

    def a_at(self, pointer: cute.Pointer) -> cute.Tensor:
        """A's descriptors (.., .., step, stage) for 64 rows at `pointer`, typed as its elements."""
        part = self._tiled(self.b.padded(self.n)).get_slice(0)
        return part.make_fragment_A(part.partition_A(self.a.matrix(pointer, ROWS)))

    def b_at(self, pointer: cute.Pointer) -> cute.Tensor:
        """B's descriptors (.., .., step, stage) for n rows at `pointer`, typed as its elements."""
        part = self._tiled(self.b.padded(self.n)).get_slice(0)
        return part.make_fragment_B(part.partition_B(self.b.matrix(pointer, self.n)))

    def issue(self, d: cute.Tensor, a: cute.Tensor, b: cute.Tensor, accumulate, steps: range | None = None) -> None:
        """Whole warpgroup: start D (+)= A B^T as a group of its own.

        Args:
            d: from `accumulator`.
            a: from `a_registers`, or a stage of `a_at`.
            b: a stage of `b_at`.
            accumulate: False overwrites D at the first step; a bool or Boolean.
            steps: which groups of 16 reduction elements; all of them by default.
        """
        warpgroup.fence()
        atom = cute.make_mma_atom(self._op(self.n))
        atom.set(Field.ACCUMULATE, accumulate)
        for step in range(self.steps) if steps is None else steps:
            cute.gemm(atom, d, a[None, None, step], b[None, None, step], d)
            atom.set(Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def _op(self, n: int) -> MmaF16BF16Op:
        source, a_major = (OperandSource.RMEM, Major.K) if self.a is None else (OperandSource.SMEM, self.a.major)
        return MmaF16BF16Op(self.dtype, Float32, (ROWS, n, K_PER_MMA), source, a_major.value, self.b.major.value)

    def _tiled(self, n: int) -> cute.TiledMma:
        return cute.make_tiled_mma(cute.make_mma_atom(self._op(n)), (1, 1, 1))


def wait(pending: int) -> None:
    """Whole warpgroup: block until at most `pending` of its latest groups are still at work."""
    warpgroup.wait_group(pending)


def pin(*values: Float32) -> None:
    """Keep the arithmetic that leads to these values before what follows.

    ptxas moves arithmetic past `wait` as if waiting were free, so that what should overlap a product comes after it. An
    instruction with an effect is not moved: a trap, on a bit pattern that no arithmetic gives (a NaN of its own).
    """
    tests = "".join(
        f"setp.eq{'.or' * (i > 0)}.b32 p, {{$r{i}}}, 0x7fc0fa40{', p' * (i > 0)}; " for i in range(len(values))
    )
    cute.arch.inline_ptx(f"{{ .reg .pred p; {tests}@p trap; }}", read_only_args=[bits(value) for value in values])
