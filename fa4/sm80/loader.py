"""Copies of tiles between global and shared memory, in 16-byte vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32
from cutlass.cute.nvgpu import cpasync

from .tensor_core import segment

_VECTOR = 8  # 16-bit elements in 16 bytes


def thread_tiling(atom: cute.CopyAtom, threads: int, columns: int) -> cute.TiledCopy:
    """Tiled copy in which neighbouring threads take neighbouring 16 bytes of a row segment of 128 (or 64) bytes."""
    threads_per_row = segment(columns) // _VECTOR
    layout = cute.make_layout((threads // threads_per_row, threads_per_row), stride=(threads_per_row, 1))
    return cute.make_tiled_copy_tv(atom, layout, cute.make_layout((1, _VECTOR)))


def async_copy(dtype: type[cutlass.Numeric]) -> cute.CopyAtom:
    """cp.async that bypasses L1; a false predicate writes zeros."""
    return cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), dtype, num_bits_per_copy=128)


def plain_copy(dtype: type[cutlass.Numeric]) -> cute.CopyAtom:
    """Plain 16-byte load or store."""
    return cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), dtype, num_bits_per_copy=128)


@dataclass(frozen=True)
class TileCopy:
    """A thread's part in copies of (rows, padded_columns) tiles. Rows may be anywhere in global memory.

    columns: columns that exist in global memory (head_dim, without the padding). A number above `padded_columns` means
        all.
    """

    copy: cute.TiledCopy
    thread: Int32
    rows: cutlass.Constexpr[int]
    padded_columns: cutlass.Constexpr[int]
    columns: Int32 | int

    def __post_init__(self) -> None:
        at_once = self.copy.size // (segment(self.padded_columns) // _VECTOR)
        if self.rows % at_once:
            raise ValueError(
                f"a tile has {self.rows} rows, expected a multiple of {at_once}: what its threads copy at once"
            )

    def _coordinates(self) -> tuple[cute.Tensor, cute.Tensor]:
        tile = cute.make_identity_tensor((self.rows, self.padded_columns))
        # Coordinates of the first thread are compile-time constants: a comparison with them costs one instruction.
        return self.copy.get_slice(self.thread).partition_S(tile), self.copy.get_slice(0).partition_S(tile)

    def _predicate(self, row_exists: Boolean | None) -> cute.Tensor | None:
        """Predicate of shape (1, column chunks): True where the source exists; None if everywhere."""
        coords, _ = self._coordinates()
        has_padding = not isinstance(self.columns, int) or self.columns != self.padded_columns
        if row_exists is None and not has_padding:
            return None
        chunks = cute.size(coords, mode=[2])
        predicate = cute.make_rmem_tensor(cute.make_layout((1, chunks)), Boolean)
        for k in range(chunks):
            exists = Boolean(True) if row_exists is None else row_exists
            if has_padding:
                exists = exists & (coords[0, 0, k][1] < self.columns)
            predicate[0, k] = exists
        return predicate

    def load_tile(self, source: cute.Tensor, target: cute.Tensor, rows_left: Int32 | None = None) -> None:
        """Start copying a (rows, columns) tile of strided rows. Rows from `rows_left` on become zeros; None means that
        all rows exist."""
        slice_copy = self.copy.get_slice(self.thread)
        gmem, smem = slice_copy.partition_S(source), slice_copy.partition_D(target)
        coords, coords0 = self._coordinates()
        for m in range(cute.size(smem, mode=[1])):
            exists = None
            if rows_left is not None:
                exists = coords0[0, m, 0][0] < rows_left - coords[0, 0, 0][0]
            predicate = self._predicate(exists)
            cute.copy(self.copy, gmem[None, m, None], smem[None, m, None], pred=predicate)

    def load_rows(self, row: Callable[[Int32], tuple[cute.Pointer, Boolean]], target: cute.Tensor) -> None:
        """Start copying rows. `row(r)` returns (address, exists) of row r; rows that do not exist become zeros."""
        smem = self.copy.get_slice(self.thread).partition_D(target)
        for m in range(cute.size(smem, mode=[1])):
            source, exists = self._row(row, m)
            cute.copy(self.copy, source, smem[None, m, None], pred=self._predicate(exists))

    def store_rows(self, source: cute.Tensor, row: Callable[[Int32], tuple[cute.Pointer, Boolean]]) -> None:
        """Copy a tile from shared memory to the rows given by `row`, except rows that do not exist."""
        smem = self.copy.get_slice(self.thread).partition_S(source)
        registers = cute.make_fragment_like(smem)
        cute.autovec_copy(smem, registers)
        for m in range(cute.size(smem, mode=[1])):
            target, exists = self._row(row, m)
            cute.copy(self.copy, registers[None, m, None], target, pred=self._predicate(exists))

    def _row(self, row: Callable, m: int) -> tuple[cute.Tensor, Boolean]:
        """Return this thread's chunks of its m-th row, ((8, 1), chunks) in global memory, and if the row exists."""
        coords, coords0 = self._coordinates()
        address, exists = row(coords[0, m, 0][0])
        chunks = cute.size(coords, mode=[2])
        step = coords0[0, 0, 1][1] if chunks > 1 else 0
        start = (address + coords[0, 0, 0][1]).align(16)
        return cute.make_tensor(start, cute.make_layout(((_VECTOR, 1), chunks), stride=((1, 0), step))), exists


def columns_from(x: cute.Tensor, first: Int32) -> cute.Tensor:
    """View of matrices that begins at a column whose address 16 divides. Its shape stays as it was."""
    return cute.make_tensor((x.iterator + first).align(16), x.layout)


def rows_of(x: cute.Tensor, begin: Int32, stop: Int32) -> Callable[[Int32], tuple[cute.Pointer, Boolean]]:
    """Return the `row` function of `TileCopy` for rows `begin` to `stop` - 1 of a matrix."""
    return lambda row: (x.iterator + cute.crd2idx((begin + row, 0), x.layout), begin + row < stop)


def store_tile(
    acc: cute.Tensor,
    mma: cute.TiledMma,
    staged: cute.Tensor,
    row: Callable,
    thread: Int32,
    threads: int,
    columns: Int32 | int,
) -> None:
    """Store accumulators in 16 bits to the rows given by `row`, staged in shared memory (`staged`) for 16-byte stores.
    columns: columns that exist in global memory."""
    element, (rows, padded_columns) = staged.element_type, cute.product_each(staged.shape)
    half = cute.make_fragment_like(acc, element)
    half.store(acc.load().to(element))
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), element, num_bits_per_copy=32)
    to_smem = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
    cute.copy(to_smem, to_smem.retile(half), to_smem.partition_D(staged))
    cute.arch.barrier()
    copy = thread_tiling(plain_copy(element), threads, padded_columns)
    TileCopy(copy, thread, rows, padded_columns, columns).store_rows(staged, row)
