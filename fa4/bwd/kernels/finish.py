"""Finish kernel of the backward: dQ = scale * sum, converted to the dtype of q.

One CTA processes one block of rows. A thread processes VECTOR columns of one row at a time (of `placement.rows` rows if
they are contiguous). It loads 16 bytes at a time (8 if the placement has shorter runs) and stores 16.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...core.rows import first_row_block
from ...core.sequence import extent, sequence_matrix
from ...core.vec_io import load_floats, pack_half, store_vec
from ...runtime.spec import GradientFactor
from ..blocks import THREADS, Placement, RowBlocks
from ..row_tensors import RowTensors

VECTOR = 8


def launch_finish(args: RowTensors, cfg: RowBlocks, stream) -> None:
    """Launch from inside a `cute.jit` host function."""
    launch = kernel(args, cfg).launch
    launch(grid=(args.order.ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=cfg.pdl)


@cute.kernel
def kernel(args: RowTensors, cfg: cutlass.Constexpr[RowBlocks]):
    if const_expr(cfg.pdl):
        cute.arch.griddepcontrol_wait()
    m_block, head, batch = args.order.here()
    query_rows = args.lengths.query_rows_of(batch, extent(args.dq))
    block = first_row_block(batch, query_rows, extent(args.dq), cfg.tile_m, cfg.packed, cfg.varlen) + m_block
    begin = m_block * cfg.tile_m
    rows = cutlass.min(query_rows.count * cfg.packed - begin, cfg.tile_m)
    if rows > 0:
        source = args.dq_sum.iterator + cute.crd2idx((0, block, head, *[0] * cfg.chained), args.dq_sum.layout)
        written = Boolean(True)
        if const_expr(cfg.first_stores):
            written = args.semaphores[(block * cfg.semaphores, head, *[0] * cfg.chained)] > 0
        dq = sequence_matrix(args.dq, head, batch, query_rows, cfg.varlen)
        placement, thread, scale = cfg.placement, cute.arch.thread_idx()[0], args.scale
        if const_expr(cfg.operands is not None):
            scale = scale * args.factors[GradientFactor.DQ, batch, head * cfg.packed // cfg.group]
        chunk = 32 * placement.rows  # columns per iteration
        threads_per_row = chunk // VECTOR
        within = thread % threads_per_row * VECTOR
        for first_column in cutlass.range_constexpr(0, cfg.head_dim, chunk):
            column = first_column + within
            for first_row in cutlass.range_constexpr(0, cfg.tile_m, THREADS // threads_per_row * placement.rows):
                row = first_row + thread // threads_per_row * placement.rows
                if row < rows and column < cfg.head_dim:
                    x = load_piece(source + placement.offset(row, first_column, within), placement)
                    if const_expr(cfg.first_stores):
                        x = [[Float32(cutlass.select_(written, y, Float32(0.0))) for y in values] for values in x]
                    if const_expr(cfg.chained):
                        x = add_chains(args, cfg, x, (block, head), placement.offset(row, first_column, within))
                    for i in cutlass.range_constexpr(placement.rows):
                        if placement.rows == 1 or row + i < rows:
                            target = dq.iterator + cute.crd2idx((begin + row + i, column), dq.layout)
                            store_scaled(target, x[i], scale, cfg.dtype)


def add_chains(
    args: RowTensors, cfg: RowBlocks, x: list[list[Float32]], coord: tuple[Int32, Int32], offset: Int32
) -> list:
    """Add the sums of the other chains to a piece x of the first chain's sum, in chain order. coord: (block, head).
    offset: of the piece from the start of a sum."""
    total = cute.make_rmem_tensor((VECTOR, cfg.placement.rows), Float32)
    for i, row_values in enumerate(x):
        for c in range(VECTOR):
            total[c, i] = row_values[c]
    sum_chains(args, cfg, total, coord[0], coord[1], offset)
    return [[total[c, i] for c in range(VECTOR)] for i in range(cfg.placement.rows)]


@cute.jit
def sum_chains(
    args: RowTensors, cfg: cutlass.Constexpr[RowBlocks], total: cute.Tensor, block: Int32, head: Int32, offset: Int32
):
    for chain in cutlass.range(1, args.semaphores.shape[2], unroll=1):
        if args.semaphores[block * cfg.semaphores, head, chain] > 0:
            source = args.dq_sum.iterator + cute.crd2idx((0, block, head, chain), args.dq_sum.layout)
            other = load_piece(source + offset, cfg.placement)
            for i in cutlass.range_constexpr(cfg.placement.rows):
                for c in cutlass.range_constexpr(VECTOR):
                    total[c, i] = total[c, i] + other[i][c]


def load_piece(source: cute.Pointer, placement: Placement) -> list[list[Float32]]:
    """Load VECTOR columns of `placement.rows` rows, starting at `source`, with the widest loads that fit."""
    first = placement.offset(0, 0, 0)
    offsets = [[placement.offset(row, 0, c) - first for c in range(VECTOR)] for row in range(placement.rows)]
    ordered = sorted(offset for row_offsets in offsets for offset in row_offsets)
    width = 4 if all(ordered[i + 3] - ordered[i] == 3 for i in range(0, len(ordered), 4)) else 2
    loaded: dict[int, Float32] = {}
    for run in ordered[::width]:
        loaded |= {run + i: x for i, x in enumerate(load_floats(source + run, width))}
    return [[loaded[offset] for offset in row_offsets] for row_offsets in offsets]


def store_scaled(target: cute.Pointer, x: list[Float32], scale: Float32, dtype: type[cutlass.Numeric]) -> None:
    pairs: list[Int32] = [pack_half(x[i] * scale, x[i + 1] * scale, dtype) for i in range(0, VECTOR, 2)]
    store_vec(target, pairs)
