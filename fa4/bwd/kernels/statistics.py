"""Statistics kernel, before the main kernel: row statistics (see `blocks`), and zero fill of dQ sums and semaphores.

One CTA processes one block of rows; LANES consecutive threads share a row. Padding rows, and rows without a visible
key, get -inf and 0: their P and dS are zero for any score. A row with NaN lse keeps it and has NaN gradients.
The kernel also computes the terms of the sink gradient, row by row: dsink = -sum_i exp(sink - lse_i) delta_i.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...core.rows import first_row_block
from ...core.sequence import extent, sequence_matrix
from ...core.softmax import LOG2_E
from ...core.vec_io import load_halves, store_vec
from ...runtime.spec import GradientFactor
from ..blocks import THREADS, RowBlocks
from ..device.ranks import rank_key_blocks
from ..row_tensors import RowTensors

LANES = 8
VECTOR = 8  # columns per lane and iteration
ROWS = THREADS // LANES  # rows per iteration


def launch_statistics(args: RowTensors, cfg: RowBlocks, stream) -> None:
    """Launch from inside a `cute.jit` host function."""
    kernel(args, cfg).launch(grid=(args.order.ctas, 1, 1), block=(THREADS, 1, 1), stream=stream)


@cute.kernel
def kernel(args: RowTensors, cfg: cutlass.Constexpr[RowBlocks]):
    if const_expr(cfg.pdl):
        cute.arch.griddepcontrol_launch_dependents()
    thread = cute.arch.thread_idx()[0]
    m_block, head, batch = args.order.here()
    query_rows = args.lengths.query_rows_of(batch, extent(args.out))
    used_rows = args.lengths.queries(batch, extent(args.out))
    if m_block * cfg.tile_m < query_rows.count * cfg.packed:
        block = first_row_block(batch, query_rows, extent(args.out), cfg.tile_m, cfg.packed, cfg.varlen) + m_block
        if const_expr(cfg.placement is not None and not cfg.first_stores):
            dq = args.dq_sum[None, block, head]
            for i in cutlass.range(thread, cfg.placement.elements // 4, THREADS, unroll=4):
                store_vec(dq.iterator + 4 * i, [Int32(0)] * 4)
        if const_expr(cfg.semaphores > 0):  # noqa: SIM102  one is decided at compile time
            if thread < cfg.semaphores:
                if const_expr(cfg.chained):
                    for chain in cutlass.range(args.semaphores.shape[2], unroll=1):
                        args.semaphores[block * cfg.semaphores + thread, head, chain] = Int32(0)
                else:
                    args.semaphores[block * cfg.semaphores + thread, head] = Int32(0)
        if const_expr(cfg.list_rows > 0):
            row = m_block * cfg.tile_m // cfg.list_rows
            rank_key_blocks(args.of_queries, args.ranks[None, block, head], batch, head, row)

        def sequence_rows(x):
            return None if const_expr(x is None) else sequence_matrix(x, head, batch, query_rows, cfg.varlen)

        out, dout, lse, dlse, dsink = (sequence_rows(x) for x in (args.out, args.dout, args.lse, args.dlse, args.dsink))
        for first in cutlass.range_constexpr(0, cfg.tile_m, ROWS):
            tile_row = first + thread // LANES
            row = m_block * cfg.tile_m + tile_row
            in_block = Boolean(True) if const_expr(cfg.tile_m % ROWS == 0) else tile_row < cfg.tile_m
            holds_data = in_block & (row < used_rows.count * cfg.packed)
            delta = row_delta(out, dout, row, holds_data, cfg)
            row_lse = -Float32.inf
            if holds_data:
                row_lse = lse[row, 0]
            has_keys = row_lse != -Float32.inf
            if const_expr(dlse is not None):
                delta = delta - (dlse[row, 0] if has_keys else Float32(0.0))
            minus_lse = Float32(cutlass.select_(has_keys, row_lse * -LOG2_E, -Float32.inf))
            delta = Float32(cutlass.select_(has_keys, delta, Float32(0.0)))
            if in_block and thread % LANES == 0:
                if const_expr(cfg.weight_exponent == 0):
                    args.statistics[tile_row, 0, block, head] = minus_lse
                    args.statistics[tile_row, 1, block, head] = -delta
                else:
                    args.statistics[tile_row, 0, block, head] = minus_lse + float(cfg.weight_exponent)
                    args.statistics[tile_row, 1, block, head] = delta * -delta_factor(args, cfg, batch, head)
                if const_expr(dsink is not None):  # noqa: SIM102  one is decided at compile time
                    if row < query_rows.count * cfg.packed:
                        sink = Float32(args.sink[head * cfg.packed + row % cfg.packed])
                        p_sink = cute.math.exp2(sink * LOG2_E + minus_lse, fastmath=True)
                        dsink[row, 0] = Float32(cutlass.select_(has_keys, -p_sink * delta, Float32(0.0)))


def delta_factor(args: RowTensors, cfg: RowBlocks, batch: Int32, head: Int32) -> Float32:
    """Factor of delta beside 2^e P."""
    if cfg.operands is None:
        return Float32(2.0**-cfg.weight_exponent)
    return args.factors[GradientFactor.DELTA, batch, head * cfg.packed // cfg.group]


@cute.jit
def row_delta(
    out: cute.Tensor, dout: cute.Tensor, row: Int32, exists: Boolean, cfg: cutlass.Constexpr[RowBlocks]
) -> Float32:
    """Sum of dO * O over a row, computed by LANES consecutive threads; all of them get the result."""
    lane = cute.arch.thread_idx()[0] % LANES
    total = Float32(0.0)
    for first in cutlass.range_constexpr(0, cfg.head_dim_v, LANES * VECTOR):
        column = first + lane * VECTOR
        if exists and column < cfg.head_dim_v:
            o, do = (load_halves(x.iterator + cute.crd2idx((row, column), x.layout), cfg.dtype) for x in (out, dout))
            for i in cutlass.range_constexpr(VECTOR):
                total = total + o[i] * do[i]
    for offset in (1, 2, 4):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
    return total
