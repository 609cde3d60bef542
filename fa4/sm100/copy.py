"""Moving tiles: global <-> shared by TMA, tensor memory <-> registers, registers -> a panelled tile."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm, nvvm, vector
from cutlass.cute.nvgpu import cpasync, tcgen05

from .constant import Constant
from .smem import PANEL_COLUMNS, PANEL_ROW_BYTES, Tile


@dataclass(frozen=True, slots=True)
class TmaTile(Constant):
    """A global tensor cut into panelled tiles; `tensor` holds TMA coordinates, with the modes (rows, columns, ...)."""

    atom: cute.CopyAtom
    tensor: cute.Tensor
    tile: Tile

    @staticmethod
    def load(tensor: cute.Tensor, tile: Tile, ctas: int = 1) -> TmaTile:
        """Host side: a TMA map that loads tiles of `tensor` (rows, columns, ...). In a pair of CTAs (`ctas` = 2) each
        loads into its own shared memory, and the bytes are counted on the first one's barrier."""
        group = tcgen05.CtaGroup.TWO if ctas == 2 else tcgen05.CtaGroup.ONE
        return TmaTile._make(cpasync.CopyBulkTensorTileG2SOp(group), tensor, tile)

    @staticmethod
    def store(tensor: cute.Tensor, tile: Tile) -> TmaTile:
        """Host side: a TMA map that stores tiles to `tensor` (rows, columns, ...)."""
        return TmaTile._make(cpasync.CopyBulkTensorTileS2GOp(), tensor, tile)

    @staticmethod
    def _make(op, tensor: cute.Tensor, tile: Tile) -> TmaTile:
        atom, coordinates = cpasync.make_tiled_tma_atom(op, tensor, tile.panel_layout(), (tile.rows, PANEL_COLUMNS))
        return TmaTile(atom, coordinates, tile)


def tma_panels(tma: TmaTile, matrix: cute.Tensor, row_tile, pointer: cute.Pointer):
    """Per panel, the (shared, global) ends of the copy of one tile.

    Args:
        matrix: `tma.tensor` sliced to (rows, columns), perhaps offset to a sequence's first row.
        row_tile: which tile along the rows.
        pointer: where the tile lies in shared memory, typed as its elements.
    """
    panels = tma.tile.panels
    shared, glob = _partition(tma, matrix, row_tile, pointer, panels)
    return [(shared[None, panel], glob[None, panel]) for panel in range(panels)]


def _partition(tma: TmaTile, matrix: cute.Tensor, row_tile, pointer: cute.Pointer, places: int):
    """(shared, global) tensors of boxes: the `places` panels from `pointer`, and the panels of a row of tiles."""
    rows = tma.tile.rows
    layout = cute.make_layout((rows, PANEL_COLUMNS, places), stride=(PANEL_COLUMNS, 1, rows * PANEL_COLUMNS))
    shared = cute.make_tensor(cute.recast_ptr(pointer, cute.make_swizzle(3, 4, 3)), layout)
    glob = cute.local_tile(matrix, (rows, PANEL_COLUMNS), (row_tile, None))
    return cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(glob, 0, 2)
    )


def tma_load(tma: TmaTile, matrix: cute.Tensor, row_tile, pointer: cute.Pointer, barrier: cute.Pointer) -> None:
    """Whole warp: start loading one tile; `tile.nbytes` bytes will be counted on `barrier`. Rows and columns outside
    the tensor become zeros."""
    for shared, glob in tma_panels(tma, matrix, row_tile, pointer):
        cute.copy(tma.atom, glob, shared, tma_bar_ptr=barrier)


def tma_load_panel(
    tma: TmaTile, matrix: cute.Tensor, row_tile, panel, pointer: cute.Pointer, barrier: cute.Pointer
) -> None:
    """Whole warp: start loading one panel of a tile; `panel` may be known at run time only."""
    shared, glob = _partition(tma, matrix, row_tile, pointer, 1)
    cute.copy(tma.atom, glob[None, panel], shared[None, 0], tma_bar_ptr=barrier)


def tma_store(tma: TmaTile, matrix: cute.Tensor, row_tile, pointer: cute.Pointer) -> None:
    """Whole warp: store one tile and wait until shared memory has been read. Rows and columns outside the tensor are
    left out."""
    ends = tma_panels(tma, matrix, row_tile, pointer)
    with cute.arch.elect_one():  # unlike a load, a store is not elected by the copy itself
        for shared, glob in ends:
            cute.copy(tma.atom, shared, glob)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def tmem_load(address, columns: int) -> list[Float32]:
    """Whole warp: this thread's lane of `columns` (a power of two) columns; valid after `tmem.wait_loads()`.

    `address` includes the warp's first lane: a warp reaches the lanes 32 * (warp % 4) to 32 * (warp % 4) + 31 only.
    """
    kind = ir.VectorType.get([columns], Int32.mlir_type) if columns > 1 else Int32.mlir_type
    loaded = nvvm.tcgen05_ld(kind, nvvm.Tcgen05LdStShape.SHAPE_32X32B, _tmem_pointer(address))
    floats = llvm.bitcast(ir.VectorType.get([columns], Float32.mlir_type) if columns > 1 else Float32.mlir_type, loaded)
    if columns == 1:
        return [Float32(floats)]
    return [Float32(vector.extract(floats, [], [i])) for i in range(columns)]


def tmem_store(address, words: list[Int32]) -> None:
    """Whole warp: write this thread's lane of len(words) columns; done after `tmem.wait_stores()`."""
    kind = ir.VectorType.get([len(words)], Int32.mlir_type)
    values = vector.from_elements(kind, [word.ir_value() for word in words])
    nvvm.tcgen05_st(nvvm.Tcgen05LdStShape.SHAPE_32X32B, _tmem_pointer(address), values)


def bits(value: Float32) -> Int32:
    """The 32 bits of a float."""
    return Int32(llvm.bitcast(Int32.mlir_type, value.ir_value()))


def pack_half(low: Float32, high: Float32, dtype: type[cutlass.Numeric]) -> Int32:
    """Two floats rounded to `dtype` in one word, `low` in the low half: one cvt.rn.{bf16x2,f16x2}.f32."""
    kind = ir.VectorType.get([2], dtype.mlir_type)
    pair = vector.from_elements(ir.VectorType.get([2], Float32.mlir_type), [low.ir_value(), high.ir_value()])
    halves = cutlass._mlir.dialects.arith.truncf(kind, pair)
    return Int32(llvm.bitcast(Int32.mlir_type, halves))


def lane_address(column, warp) -> Int32:
    """Tensor-memory address of `column` at the first lane that `warp` may reach."""
    return (warp % 4) << 21 | Int32(column)


def store_row_chunk(
    tile_address, tile: Tile, row, column: int, words: list[Int32], space=cute.AddressSpace.smem
) -> None:
    """Write 8 elements (4 words) at (row, column) of a panelled tile; `column` is a multiple of 8. `space` may be
    distributed shared memory, `tile_address` being another CTA's."""
    panel, within = divmod(column, PANEL_COLUMNS)
    chunk = (within // 8) ^ (row & 7)
    address = tile_address + panel * tile.panel_bytes + row * PANEL_ROW_BYTES + chunk * 16
    store_words(cute.make_ptr(Int32, address, space, assumed_align=16), words)


def store_row(tile_address, tile: Tile, row, column: int, words: list[Int32], space=cute.AddressSpace.smem) -> None:
    """Write 2 * len(words) elements of a row of a panelled tile, from `column`; both are multiples of 8."""
    for i in range(0, len(words), 4):
        store_row_chunk(tile_address, tile, row, column + 2 * i, words[i : i + 4], space)


def store_words(pointer: cute.Pointer, words: list[Int32]) -> None:
    """One store of up to four 32-bit words to an address that their size divides."""
    kind = ir.VectorType.get([len(words)], Int32.mlir_type)
    values = vector.from_elements(kind, [word.ir_value() for word in words])
    llvm.store(values, pointer.llvm_ptr, alignment=4 * len(words))


def _tmem_pointer(address):
    return llvm.inttoptr(llvm.PointerType.get(6), Int32(address).ir_value())
