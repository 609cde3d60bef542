"""Before the main kernel, one CTA per block of query rows: the rows' statistics, and cleared workspaces for dQ.

The statistics are what the main kernel adds: -lse * log2(e) and -delta, delta = rowsum(dO * O) - dLSE. Rows without
data or without a visible key get -inf and 0, which makes their P and dS zero, whatever the scores are.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir import ir
from cutlass._mlir.dialects import arith, llvm, vector

from ...core.rows import first_row_block
from ...core.sequence import Rows
from ...core.softmax import LOG2_E
from ...core.words import store_words
from ..exp2 import exp2_mufu

THREADS = 256
LANES = 8  # threads of one row, 8 columns each at a time
VECTOR = 8
ROWS = THREADS // LANES


@cute.jit
def statistics(args, cfg: cutlass.Constexpr):
    """The body of one CTA of the grid `args.row_order`."""
    thread = cute.arch.thread_idx()[0]
    m_block, head, batch = args.row_order.here()
    place = args.lengths.query_place(batch, args.seqlen_q)
    data = args.lengths.queries(batch, args.seqlen_q)
    if m_block * cfg.tile_m < place.count:
        block = first_row_block(batch, place, args.seqlen_q, cfg.tile_m, 1, cfg.varlen) + m_block
        dq = args.dq_rows[None, block, head]
        for i in cutlass.range(thread, cute.size(dq) // 4, THREADS, unroll=4):
            store_words(dq.iterator + 4 * i, [Int32(0)] * 4)

        if cutlass.const_expr(cfg.deterministic):
            clear_turns(args.turns, block, head, cfg)

        out = rows_of(args.out, head, batch, place, cfg.varlen)
        dout = rows_of(args.dout, head, batch, place, cfg.varlen)
        lse = lse_of(args.lse, head, batch, place, cfg.varlen)
        dlse = lse_of(args.dlse, head, batch, place, cfg.varlen) if cfg.has_dlse else None
        dsink = Float32(0.0)
        for first in cutlass.range_constexpr(0, cfg.tile_m, ROWS):
            in_tile = first + thread // LANES
            row = m_block * cfg.tile_m + in_tile
            holds_data = row < data.count
            delta = row_delta(out, dout, row, holds_data, cfg)
            row_lse = -Float32.inf
            if holds_data:
                row_lse = lse[row]
            is_seen = row_lse > -Float32.inf
            if cutlass.const_expr(cfg.has_dlse):
                delta = delta - (dlse[row] if is_seen else Float32(0.0))
            minus_lse = Float32(cutlass.select_(is_seen, row_lse * -LOG2_E, -Float32.inf))
            delta = Float32(cutlass.select_(is_seen, delta, Float32(0.0)))
            if thread % LANES == 0:
                args.rows[in_tile, 0, block, head] = minus_lse
                args.rows[in_tile, 1, block, head] = -delta
            if cutlass.const_expr(cfg.has_sink):
                weight = exp2_mufu(args.sink[head] * LOG2_E + minus_lse)
                dsink = dsink - Float32(cutlass.select_(is_seen, weight * delta, Float32(0.0)))
        if cutlass.const_expr(cfg.has_sink):
            args.dsink_rows[thread, block, head] = Float32(cutlass.select_(thread % LANES == 0, dsink, Float32(0.0)))


@cute.jit
def clear_turns(turns: cute.Tensor, block: Int32, head: Int32, cfg: cutlass.Constexpr):
    """No key block has added to this query block yet."""
    thread = cute.arch.thread_idx()[0]
    if thread < cfg.ctas:
        turns[block * cfg.ctas + thread, head] = Int32(0)


def rows_of(x: cute.Tensor, head: Int32, batch: Int32, rows: Rows, varlen: bool) -> cute.Tensor:
    """(rows, columns) of one head of one sequence, from (rows, columns, heads[, batch]) in plain memory."""
    if varlen:
        return cute.domain_offset((rows.first, 0), x[None, None, head])
    return x[None, None, head, batch]


def lse_of(x: cute.Tensor, head: Int32, batch: Int32, rows: Rows, varlen: bool) -> cute.Tensor:
    """(rows,) of one head of one sequence, from (heads, rows) or (batch, heads, rows)."""
    if varlen:
        return cute.domain_offset((rows.first,), x[head, None])
    return x[batch, head, None]


@cute.jit
def row_delta(out: cute.Tensor, dout: cute.Tensor, row: Int32, exists: Boolean, cfg: cutlass.Constexpr) -> Float32:
    """sum of dO * O over a row, by LANES neighbouring threads; every one of them gets it."""
    lane = cute.arch.thread_idx()[0] % LANES
    total = Float32(0.0)
    for first in cutlass.range_constexpr(0, cfg.head_dim_v, LANES * VECTOR):
        column = first + lane * VECTOR
        if exists and column < cfg.head_dim_v:
            o, do = (load_vector(x.iterator + cute.crd2idx((row, column), x.layout), cfg.dtype) for x in (out, dout))
            for i in cutlass.range_constexpr(VECTOR):
                total = total + o[i] * do[i]
    for offset in (1, 2, 4):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
    return total


def load_vector(pointer: cute.Pointer, dtype) -> list[Float32]:
    """8 numbers of 16 bits by one load, as floats."""
    loaded = llvm.load(ir.VectorType.get([VECTOR], dtype.mlir_type), pointer.llvm_ptr, alignment=2 * VECTOR)
    wide = arith.extf(ir.VectorType.get([VECTOR], Float32.mlir_type), loaded)
    return [Float32(vector.extract(wide, [], [i])) for i in range(VECTOR)]
