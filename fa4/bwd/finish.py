"""After the backward's main kernel: dQ = scale * sum, in the input's dtype.

One CTA has one block of rows. A thread takes VECTOR columns of a row (of several rows, where those are neighbours) at a
time. It reads 16 bytes at a time (8 where the placement has no more side by side) and writes 16.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..core.rows import first_row_block
from ..core.sequence import extent, sequence_matrix
from ..core.vec_io import load_floats, pack_half, store_vec
from .blocks import THREADS, Placement, RowBlocks, RowTensors

VECTOR = 8


def launch_finish(args: RowTensors, cfg: RowBlocks, stream) -> None:
    """Inside a `cute.jit` host function."""
    launch = kernel(args, cfg).launch
    launch(grid=(args.order.ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=cfg.pdl)


@cute.kernel
def kernel(args: RowTensors, cfg: cutlass.Constexpr[RowBlocks]):
    if cutlass.const_expr(cfg.pdl):
        cute.arch.griddepcontrol_wait()
    m_block, head, batch = args.order.here()
    place = args.lengths.query_place(batch, extent(args.dq))
    block = first_row_block(batch, place, extent(args.dq), cfg.tile_m, cfg.packed, cfg.varlen) + m_block
    begin = m_block * cfg.tile_m
    rows = cutlass.min(place.count * cfg.packed - begin, cfg.tile_m)
    if rows > 0:
        source = args.dq_sum.iterator + cute.crd2idx((0, block, head, *[0] * cfg.chained), args.dq_sum.layout)
        is_met = Boolean(True)
        if cutlass.const_expr(cfg.first_stores):
            is_met = args.semaphores[(block * cfg.semaphores, head, *[0] * cfg.chained)] > 0
        dq = sequence_matrix(args.dq, head, batch, place, cfg.varlen)
        placement, thread = cfg.placement, cute.arch.thread_idx()[0]
        chunk = 32 * placement.rows  # columns at a time
        across = chunk // VECTOR
        within = thread % across * VECTOR
        for left in cutlass.range_constexpr(0, cfg.head_dim, chunk):
            column = left + within
            for top in cutlass.range_constexpr(0, cfg.tile_m, THREADS // across * placement.rows):
                row = top + thread // across * placement.rows
                if row < rows and column < cfg.head_dim:
                    x = piece(source + placement.offset(row, left, within), placement)
                    if cutlass.const_expr(cfg.first_stores):
                        x = [[Float32(cutlass.select_(is_met, y, Float32(0.0))) for y in of_row] for of_row in x]
                    if cutlass.const_expr(cfg.chained):
                        x = with_others(args, cfg, x, (block, head), placement.offset(row, left, within))
                    for i in cutlass.range_constexpr(placement.rows):
                        if placement.rows == 1 or row + i < rows:
                            target = dq.iterator + cute.crd2idx((begin + row + i, column), dq.layout)
                            store_scaled(target, x[i], args.scale, cfg.dtype)


def with_others(args, cfg: RowBlocks, x: list[list[Float32]], at: tuple[Int32, Int32], offset: Int32) -> list:
    """The numbers of a piece of the first chain's sum, and those of the others added, chain after chain. at: (block,
    head). offset: the piece's from the start of a sum."""
    total = cute.make_rmem_tensor((VECTOR, cfg.placement.rows), Float32)
    for i, of_row in enumerate(x):
        for c in range(VECTOR):
            total[c, i] = of_row[c]
    add_others(args, cfg, total, at[0], at[1], offset)
    return [[total[c, i] for c in range(VECTOR)] for i in range(cfg.placement.rows)]


@cute.jit
def add_others(args, cfg: cutlass.Constexpr[RowBlocks], total: cute.Tensor, block: Int32, head: Int32, offset: Int32):
    for chain in cutlass.range(1, args.semaphores.shape[2], unroll=1):
        if args.semaphores[block * cfg.semaphores, head, chain] > 0:
            source = args.dq_sum.iterator + cute.crd2idx((0, block, head, chain), args.dq_sum.layout)
            other = piece(source + offset, cfg.placement)
            for i in cutlass.range_constexpr(cfg.placement.rows):
                for c in cutlass.range_constexpr(VECTOR):
                    total[c, i] = total[c, i] + other[i][c]


def piece(source: cute.Pointer, placement: Placement) -> list[list[Float32]]:
    """VECTOR columns of each of the placement's rows, the first of them at `source`, by the widest loads that fit."""
    first = placement.offset(0, 0, 0)
    places = [[placement.offset(row, 0, c) - first for c in range(VECTOR)] for row in range(placement.rows)]
    ordered = sorted(place for of_row in places for place in of_row)
    width = 4 if all(ordered[i + 3] - ordered[i] == 3 for i in range(0, len(ordered), 4)) else 2
    loaded = {}
    for run in ordered[::width]:
        loaded |= {run + i: x for i, x in enumerate(load_floats(source + run, width))}
    return [[loaded[place] for place in of_row] for of_row in places]


def store_scaled(target: cute.Pointer, x: list[Float32], scale: Float32, dtype: type[cutlass.Numeric]) -> None:
    words: list[Int32] = [pack_half(x[i] * scale, x[i + 1] * scale, dtype) for i in range(0, VECTOR, 2)]
    store_vec(target, words)
