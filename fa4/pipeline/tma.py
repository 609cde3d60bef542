"""TMA copies: tiles in panels between global and shared memory, and one-dimensional bulk copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int16, Int32, Int64
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute_nvgpu, nvvm
from cutlass.cute.nvgpu import cpasync, tcgen05

from ..core.constant import Constant
from .smem import Tile


class TmaMap(NamedTuple):
    """The kernel arguments of a `TmaTile`; its tile is a compile-time constant of the kernel."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


@dataclass(frozen=True, slots=True)
class TmaTile(Constant):
    """A global tensor of tiles. tensor: TMA coordinates with the modes (rows, columns, ...).

    multicast: CTAs of a cluster that load a tile together; each loads an equal share of its rows into all of them.
    """

    atom: cute.CopyAtom
    tensor: cute.Tensor
    tile: Tile
    multicast: int = 1

    @staticmethod
    def load(tensor: cute.Tensor, tile: Tile, ctas: int = 1, multicast: int = 1) -> TmaTile:
        """Host side: return a TMA map that loads tiles of `tensor` (rows, columns, ...).

        Args:
            ctas: 2 for a pair of CTAs (sm_100): each loads into its own shared memory, and the first CTA's barrier
                counts the bytes.
            multicast: CTAs that load each tile together (sm_90 and newer); every CTA's own barrier counts the bytes of
                all shares.
        """
        group = tcgen05.CtaGroup.TWO if ctas == 2 else tcgen05.CtaGroup.ONE
        kind = cpasync.CopyBulkTensorTileG2SOp if multicast == 1 else cpasync.CopyBulkTensorTileG2SMulticastOp
        return TmaTile._make(kind(group), tensor, tile, multicast)

    @staticmethod
    def store(tensor: cute.Tensor, tile: Tile) -> TmaTile:
        """Host side: return a TMA map that stores tiles to `tensor` (rows, columns, ...)."""
        return TmaTile._make(cpasync.CopyBulkTensorTileS2GOp(), tensor, tile)

    @property
    def map(self) -> TmaMap:
        return TmaMap(self.atom, self.tensor)

    @staticmethod
    def _make(op, tensor: cute.Tensor, tile: Tile, multicast: int = 1) -> TmaTile:
        box = Tile(tile.piece_rows // multicast, tile.columns, tile.bits, row_bytes=tile.row_bytes)
        shape = (_by_head(box.rows, tile.slots), tile.panel_columns)
        atom, coordinates = cpasync.make_tiled_tma_atom(op, tensor, box.panel_layout(), shape)
        return TmaTile(atom, coordinates, tile, multicast)


def _by_head(rows: int, slots: int):
    """Shape of a tile's rows: (slots, rows per slot) if rows are (head, row) pairs."""
    return rows if slots == 1 else (slots, rows // slots)


def tma_panels(tma: TmaTile, matrix: cute.Tensor, row_tile: Int32, pointer: cute.Pointer, rank: Int32 | int = 0):
    """Return the (shared, global) tensors of each panel's copy, for one tile or its share or piece `rank`.

    Args:
        matrix: `tma.tensor` sliced to (rows, columns), possibly offset to a sequence's first row.
        row_tile: tile index along the rows; with pieces or shares, the index of the piece or share.
        pointer: the tile in shared memory, with its element type.
    """
    panels = tma.tile.panels
    shared, glob = _partition(tma, matrix, row_tile, pointer, panels, rank)
    return [(shared[None, panel], glob[None, panel]) for panel in range(panels)]


def _partition(
    tma: TmaTile, matrix: cute.Tensor, row_tile: Int32, pointer: cute.Pointer, panels: int, rank: Int32 | int = 0
):
    """(shared, global) tensors of boxes: `panels` panels from `pointer`, and all panels of the tile's rows."""
    rows, columns = tma.tile.piece_rows // tma.multicast, tma.tile.panel_columns
    if tma.multicast > 1 or tma.tile.pieces > 1:
        pointer = pointer + rank * (rows * columns)
    layout = cute.make_layout((rows, columns, panels), stride=(columns, 1, tma.tile.rows * columns))
    shared = cute.make_tensor(cute.recast_ptr(pointer, tma.tile.swizzle()), layout)
    coord = row_tile if tma.tile.slots == 1 else (0, row_tile)
    glob = cute.local_tile(matrix, (_by_head(rows, tma.tile.slots), columns), (coord, None))
    return cpasync.tma_partition(
        tma.atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(glob, 0, 2)
    )


def tma_load(
    tma: TmaTile,
    matrix: cute.Tensor,
    row_tile: Int32,
    pointer: cute.Pointer,
    barrier: cute.Pointer,
    rank: Int32 | int = 0,
    panels: slice = slice(None),
) -> None:
    """Whole warp: start loading one tile, or these of its panels; `barrier` counts its `tile.nbytes` bytes. Rows and
    columns outside the tensor become zeros.

    With multicast, CTA `rank` loads its share into all CTAs at the same shared-memory address. The barrier at the same
    address in each CTA counts the share's bytes; `row_tile` counts shares. With pieces, `rank` is the piece's position
    in the tile, and `row_tile` counts pieces.
    """
    extra = {} if tma.multicast == 1 else {"mcast_mask": Int16((1 << tma.multicast) - 1)}
    for shared, glob in tma_panels(tma, matrix, row_tile, pointer, rank)[panels]:
        cute.copy(tma.atom, glob, shared, tma_bar_ptr=barrier, **extra)


def tma_load_panel(
    tma: TmaTile,
    matrix: cute.Tensor,
    row_tile: Int32,
    panel: Int32,
    pointer: cute.Pointer,
    barrier: cute.Pointer,
    rank: int = 0,
) -> None:
    """Whole warp: start loading one panel of a tile; `panel` may be a run-time value. rank: as in `tma_load`."""
    shared, glob = _partition(tma, matrix, row_tile, pointer, 1, rank)
    cute.copy(tma.atom, glob[None, panel], shared[None, 0], tma_bar_ptr=barrier)


def descriptor_of(tma: TmaTile) -> Int64:
    """Return the generic address of the TMA map of a load."""
    pointer = ir.Type.parse("!cute.ptr<!cute_nvgpu.tma_descriptor_tiled, generic, align<64>>")
    executable = cute_nvgpu.atom_make_exec_tma(tma.atom._trait.value)
    address = cute_nvgpu.get_tma_desc_addr(pointer, executable)  # the bindings make it a `cute.Pointer`
    return Int64(cute_nvgpu.cast_tma_desc_to_integer(Int64.mlir_type, address.value))


def tma_gather(
    descriptor: Int64, rows: list[Int32], column: Int32, address: Int32, barrier: cute.Pointer, ctas: int
) -> None:
    """Each thread (sm_100): start loading 128 bytes of any four rows of a matrix to consecutive rows of a panel.

    Args:
        descriptor: of the map of a (rows, columns) tensor, whose boxes have one row. column: of the first element.
        address: of the first row in this CTA's shared memory.
        barrier: counts the bytes; with two `ctas`, the one at this address in the first CTA of the pair.
    """
    pair, own = (".cta_group::2", 0xFEFFFFFF) if ctas == 2 else ("", 0xFFFFFFFF)
    coordinates = ", ".join(f"{{$r{i}}}" for i in range(3, 8))
    cute.arch.inline_ptx(
        f"""{{
        .reg .b32 barrier;
        and.b32 barrier, {{$r2}}, {own};
        cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes{pair}
            [{{$r0}}], [{{$r1}}, {{ {coordinates} }}], [barrier];
        }}""",
        read_only_args=[address, descriptor, barrier.toint(), column, *rows],
    )


def tma_store(tma: TmaTile, matrix: cute.Tensor, row_tile: Int32, pointer: cute.Pointer) -> None:
    """Whole warp: store one tile and wait until shared memory has been read. Skip rows and columns outside the
    tensor."""
    tma_start_store(tma, matrix, row_tile, pointer)
    wait_read()


def tma_start_store(tma: TmaTile, matrix: cute.Tensor, row_tile: Int32, pointer: cute.Pointer) -> None:
    """Whole warp: start storing one tile. Skip rows and columns outside the tensor."""
    sides = tma_panels(tma, matrix, row_tile, pointer)
    with cute.arch.elect_one():  # a store, unlike a load, does not elect a thread itself
        for shared, glob in sides:
            cute.copy(tma.atom, shared, glob)
        cute.arch.cp_async_bulk_commit_group()


def wait_read() -> None:
    """Whole warp: wait until its stores have read shared memory."""
    with cute.arch.elect_one():
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def bulk_load(source: cute.Pointer, target: cute.Pointer, nbytes: int, barrier: cute.Pointer) -> None:
    """One thread: start copying `nbytes` (a multiple of 16) to shared memory; `barrier` counts them."""
    nvvm.cp_async_bulk_shared_cluster_global(
        target.llvm_ptr, source.llvm_ptr, barrier.llvm_ptr, Int32(nbytes).ir_value()
    )


def bulk_store(source: cute.Pointer, target: cute.Pointer, nbytes: int) -> None:
    """One thread: start copying bytes from shared to global memory. The caller commits and waits for the bulk group."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), Int32(nbytes)],
    )


def bulk_add(source: cute.Pointer, target: cute.Pointer, nbytes: int) -> None:
    """One thread: start adding float32 values in shared memory to global memory. Bulk group: as in `bulk_store`."""
    cute.arch.inline_ptx(
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target.toint(), source.toint(), Int32(nbytes)],
    )


def bulk_copy_to(rank: Int32, source: Int32, target: Int32, nbytes: int, barrier: cute.Pointer) -> None:
    """One thread: start copying `nbytes` (a multiple of 16) from this CTA's shared memory (`source`) to that of CTA
    `rank` in the cluster (`target`). The barrier of that CTA at the address of `barrier` counts them."""
    cute.arch.inline_ptx(
        """{
        .reg .b32 place, barrier;
        mapa.shared::cluster.u32 place, {$r0}, {$r3};
        mapa.shared::cluster.u32 barrier, {$r2}, {$r3};
        cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [place], [{$r1}], {$r4}, [barrier];
        }""",
        read_only_args=[target, source, barrier.toint(), rank, Int32(nbytes)],
    )


def store_to(rank: Int32, target: Int32, value: Int32, barrier: cute.Pointer) -> None:
    """Each thread: start storing 4 bytes to the shared memory of CTA `rank` in the cluster (`target`). The barrier of
    that CTA at the address of `barrier` counts them."""
    cute.arch.inline_ptx(
        """{
        .reg .b32 place, barrier;
        mapa.shared::cluster.u32 place, {$r0}, {$r3};
        mapa.shared::cluster.u32 barrier, {$r2}, {$r3};
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [place], {$r1}, [barrier];
        }""",
        read_only_args=[target, value, barrier.toint(), rank],
    )
