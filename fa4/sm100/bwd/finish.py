"""After the main kernel, one CTA per block of query rows: dQ = scale * accumulator, in the input's dtype."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from ...core.seqlen import Rows
from ..copy import pack_half, store_words
from .compute import load_floats
from .config import CHUNK, CHUNK_BYTES, TILE_M
from .statistics import THREADS, rows_of
from .work import first_row_block

VECTOR = 8  # columns of one thread
LANES = CHUNK // VECTOR  # threads of one row in a chunk
ROWS = THREADS // LANES


@cute.jit
def finish(args, cfg: cutlass.Constexpr):
    """The body of one CTA of the grid `args.row_grid`."""
    thread = cute.arch.thread_idx()[0]
    m_block, head, batch = args.row_grid.coordinates()
    place = Rows.of(batch, args.seqlen_q, args.cu_seqlens_q, None)
    block = first_row_block(batch, args.cu_seqlens_q, args.seqlen_q) + m_block
    within = thread % LANES * VECTOR
    if m_block * TILE_M < place.count:
        accumulator = args.dq_rows[None, block, head].iterator
        dq = rows_of(args.dq, head, batch, place, cfg.varlen)
        for first in cutlass.range_constexpr(0, TILE_M, ROWS):
            in_tile = first + thread // LANES
            row = m_block * TILE_M + in_tile
            for column in cutlass.range_constexpr(0, cfg.head_dim, CHUNK):
                if row < place.count and column + within < cfg.head_dim:
                    source = accumulator + (column // CHUNK * (CHUNK_BYTES // 4) + within * TILE_M + 4 * in_tile)
                    x = load_floats(source, 4) + load_floats(source + 4 * TILE_M, 4)
                    words = []
                    for i in cutlass.range_constexpr(0, VECTOR, 2):
                        words.append(pack_half(x[i] * args.scale, x[i + 1] * args.scale, cfg.dtype))
                    target = dq.iterator + cute.crd2idx((row, column + within), dq.layout)
                    store_words(target, words)
