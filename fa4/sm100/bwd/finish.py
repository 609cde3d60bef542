"""After the main kernel, one CTA per block of query rows: dQ = scale * accumulator, in the input's dtype."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.rows import first_row_block
from ...core.words import load_floats, pack_half, store_words
from .config import CHUNK, CHUNK_BYTES, LANES
from .statistics import THREADS, rows_of

VECTOR = 8  # columns of one thread
ACROSS = CHUNK // VECTOR  # threads of one row in a chunk
DOWN = THREADS // ACROSS


@cute.jit
def finish(args, cfg: cutlass.Constexpr):
    """The body of one CTA of the grid `args.row_order`."""
    m_block, head, batch = args.row_order.here()
    place = args.lengths.query_place(batch, args.seqlen_q)
    block = first_row_block(batch, place, args.seqlen_q, cfg.tile_m, 1, cfg.varlen) + m_block
    rows = place.count - m_block * cfg.tile_m
    if rows > 0:
        accumulator = args.dq_rows[None, block, head].iterator
        dq = cute.domain_offset((m_block * cfg.tile_m, 0), rows_of(args.dq, head, batch, place, cfg.varlen))
        if cutlass.const_expr(cfg.dq_transposed):
            from_columns(accumulator, dq, rows, args.scale, cfg)
        else:
            from_rows(accumulator, dq, rows, args.scale, cfg)


@cute.jit
def from_rows(accumulator: cute.Pointer, dq: cute.Tensor, rows: Int32, scale: Float32, cfg: cutlass.Constexpr):
    """Chunks of (CHUNK / 4, lane, 4) columns: a thread takes VECTOR columns of a query."""
    thread = cute.arch.thread_idx()[0]
    within = thread % ACROSS * VECTOR
    for first in cutlass.range_constexpr(0, cfg.tile_m, DOWN):
        row = first + thread // ACROSS
        for column in cutlass.range_constexpr(0, cfg.head_dim, CHUNK):
            if row < rows and column + within < cfg.head_dim:
                chunk, lane = chunk_and_lane(row, column, cfg)
                source = accumulator + (chunk * (CHUNK_BYTES // 4) + within * LANES + 4 * lane)
                x = load_floats(source, 4) + load_floats(source + 4 * LANES, 4)
                store_scaled(dq, row, column + within, x, scale, cfg)


def chunk_and_lane(row: Int32, column: int, cfg) -> tuple[Int32, Int32]:
    """Where the role `reduce` had a query's columns from `column`, a multiple of CHUNK."""
    if cfg.ctas == 1:
        return Int32(column // CHUNK), row
    rows, columns = cfg.tile_m // 2, cfg.columns // 2
    chunk = row // rows * (columns // CHUNK) + column % columns // CHUNK
    return chunk, row % rows + column // columns * rows


@cute.jit
def from_columns(accumulator: cute.Pointer, dq: cute.Tensor, rows: Int32, scale: Float32, cfg: cutlass.Constexpr):
    """(query / 4, column, 4 queries), the first LANES columns and then the rest: a thread takes 4 queries."""
    across = cfg.head_dim // VECTOR
    for unit in cutlass.range(cute.arch.thread_idx()[0], cfg.tile_m // 4 * across, THREADS, unroll=1):
        quad, column = unit // across, unit % across * VECTOR
        source = accumulator + (quad * LANES + column) * 4
        if column >= LANES:
            source = accumulator + (cfg.tile_m * LANES + (quad * (cfg.columns - LANES) + column - LANES) * 4)
        x = [load_floats(source + 4 * i, 4) for i in range(VECTOR)]
        for i in cutlass.range_constexpr(4):
            if 4 * quad + i < rows:
                store_scaled(dq, 4 * quad + i, column, [of_column[i] for of_column in x], scale, cfg)


def store_scaled(dq: cute.Tensor, row: Int32, column: Int32, x: list[Float32], scale: Float32, cfg) -> None:
    """VECTOR columns of a row, in the input's dtype."""
    words = [pack_half(x[i] * scale, x[i + 1] * scale, cfg.dtype) for i in range(0, VECTOR, 2)]
    store_words(dq.iterator + cute.crd2idx((row, column), dq.layout), words)
