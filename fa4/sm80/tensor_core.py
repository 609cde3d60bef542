"""Warp-level mma.sync: shared-memory layouts that ldmatrix reads without bank conflicts, and the product loops.

A product is (M, N) += (M, K) (N, K)^T with fp32 accumulators. A thread's accumulator has shape ((2, 2), M', N'): two
neighbouring columns, two rows with distance eight, and M' x N' repetitions of the 16x8 instruction in a warp's tile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warp

from ..core.fragment_coords import FragmentCoords


def segment(columns: int) -> int:
    """Columns of a row that lie together in shared memory: 128 bytes if they divide the row, else 64 or 32."""
    return math.gcd(columns, 64)


def smem_layout(rows: int, columns: int, stages: int | None = None) -> cute.ComposedLayout:
    """Layout of a row-major 16-bit tile in swizzled blocks of 8 rows by a segment, with `stages` if given."""
    width = segment(columns)
    swizzle = cute.make_swizzle(width.bit_length() - 4, 3, 3)
    block = cute.make_composed_layout(swizzle, 0, cute.make_layout((8, width), stride=(width, 1)))
    if stages is None:
        return cute.tile_to_shape(block, (rows, columns), (0, 1))
    return cute.tile_to_shape(block, (rows, columns, stages), (0, 1, 2))


def column_slices(tile: cute.Tensor, slices: int) -> cute.Tensor:
    """View of a tile (rows, columns[, stages]) in slices of its columns: (rows, columns / slices, [stages *] slices).
    A slice has whole segments."""
    rows, columns, *stages = (cute.size(tile, mode=[i]) for i in range(cute.rank(tile)))
    return cute.make_tensor(tile.iterator, smem_layout(rows, columns // slices, math.prod(stages) * slices))


def transposed(x: cute.Tensor) -> cute.Tensor:
    """View with axes 0 and 1 exchanged."""
    order = (1, 0, *range(2, cute.rank(x)))
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(order)))


def tiled_mma(dtype: type[cutlass.Numeric], warps_m: int, warps_n: int) -> cute.TiledMma:
    """m16n8k16 over a grid of warps; groups of 8 columns alternate between the warps of a row. The tile has twice the
    needed width, so that one ldmatrix.x4 reads two of a warp's column groups of operand B."""
    atom = warp.MmaF16BF16Op(dtype, Float32, (16, 8, 16))
    return cute.make_tiled_mma(atom, (warps_m, warps_n, 1), permutation_mnk=(warps_m * 16, warps_n * 16, 16))


def rows_by_columns(acc: cute.Tensor) -> cute.Tensor:
    """View of an accumulator ((2, 2), M', N') as rows by columns: ((2, M'), (2, N'))."""
    src = acc.layout
    layout = cute.make_layout(
        ((src.shape[0][1], src.shape[1]), (src.shape[0][0], src.shape[2])),
        stride=((src.stride[0][1], src.stride[1]), (src.stride[0][0], src.stride[2])),
    )
    return cute.make_tensor(acc.iterator, layout)


def mma_coords(coords: cute.Tensor, coords0: cute.Tensor, row: cutlass.Int32, column: cutlass.Int32) -> FragmentCoords:
    """Fragment coordinates of a thread's accumulators in a tile that begins at `row` and `column`.

    coords, coords0: (row, column) in the tile of each accumulator of this thread and of thread 0, rows by columns.
    """
    rows = tuple(row + coords[r, 0][0] for r in range(cute.size(coords, mode=[0])))
    offsets = [coords0[0, c][1] - coords0[0, 0][1] for c in range(cute.size(coords, mode=[1]))]
    fragment = FragmentCoords(rows, column + coords[0, 0][1], len(offsets), period=offsets[2])
    assert fragment.offsets == offsets
    return fragment


def as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """View of a 16-bit accumulator ((2, 2), M', N') as operand A, reduced over its columns: ((2, 2, 2), M', N' / 2)."""
    src = cute.logical_divide(acc.layout, (None, None, 2))
    layout = cute.make_layout(
        ((src.shape[0][0], src.shape[0][1], src.shape[2][0]), src.shape[1], src.shape[2][1]),
        stride=((src.stride[0][0], src.stride[0][1], src.stride[2][0]), src.stride[1], src.stride[2][1]),
    )
    return cute.make_tensor(acc.iterator, layout)


@dataclass(frozen=True)
class Operand:
    """Operand of a product in shared memory, as one thread reads it with ldmatrix. See `operand_a` and `operand_b`.

    source: (copy, M' or N', K'[, stage]).
    """

    copy: cute.TiledCopy
    source: cute.Tensor
    fragment: cute.Tensor

    def at(self, stage: cutlass.Int32 | int) -> Operand:
        """Return the operand of one stage."""
        return Operand(self.copy, self.source[None, None, None, stage], self.fragment)

    def load(self, k: int) -> None:
        """Load the k-th slice of 16 into registers."""
        registers = self.copy.retile(self.fragment)
        cute.copy(self.copy, self.source[None, None, k], registers[None, None, k])


def operand_a(mma: cute.TiledMma, tile: cute.Tensor, thread: cutlass.Int32, transpose: bool = False) -> Operand:
    """Operand A (M, K[, stage]) in shared memory. transpose: M is contiguous in memory."""
    own = mma.get_slice(thread)
    return _operand(
        cute.make_tiled_copy_A, lambda x: own.make_fragment_A(own.partition_A(x)), mma, tile, thread, transpose
    )


def operand_b(mma: cute.TiledMma, tile: cute.Tensor, thread: cutlass.Int32, transpose: bool = False) -> Operand:
    """Operand B (N, K[, stage]) in shared memory. transpose: N is contiguous in memory."""
    own = mma.get_slice(thread)
    return _operand(
        cute.make_tiled_copy_B, lambda x: own.make_fragment_B(own.partition_B(x)), mma, tile, thread, transpose
    )


def _operand(tiled_copy, fragment, mma, tile, thread, transpose: bool) -> Operand:
    """Operand read by ldmatrix.x4. tiled_copy, fragment: constructors for A or for B."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, 4), tile.element_type)
    copy = tiled_copy(atom, mma).get_slice(thread)
    first_stage = tile if cute.rank(tile) == 2 else tile[None, None, 0]
    return Operand(copy, copy.partition_S(tile), fragment(first_stage))


def product(mma: cute.TiledMma, acc: cute.Tensor, a: Operand | cute.Tensor, b: Operand) -> None:
    """acc += A B^T, with A in shared memory or in registers as ((2, 2, 2), M', K'). Loads of the next slice overlap the
    products of the current one."""
    from_smem = isinstance(a, Operand)
    a_registers = a.fragment if isinstance(a, Operand) else a
    slices = cute.size(b.source, mode=[2])
    if from_smem:
        a.load(0)
    b.load(0)
    for k in range(slices):
        if k + 1 < slices:
            if from_smem:
                a.load(k + 1)
            b.load(k + 1)
        cute.gemm(mma, acc, a_registers[None, None, k], b.fragment[None, None, k], acc)
