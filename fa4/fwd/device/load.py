"""Loads of Q, K and V by TMA, in the order in which the products of the consumers read them.

Order per work tile: the first K; Q of each consumer; then each next K followed by the V before it; the last V. A load
role does not wait for the end of a work tile: it loads the next K and Q while the consumers still work on O.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8

from ...core.sequence import sequence_matrix
from ...pipeline.cursor import Cursor
from ...pipeline.tma import tma_load
from .queue import Queue, row_tile
from .work import Work


@cute.jit
def load_qkv(context: Any, q: list[Cursor], k: Cursor, v: Cursor, load_k: cutlass.Constexpr, load_v: cutlass.Constexpr):
    """Load Q, K and V in the order in which the products read them. load_k, load_v: called with (context, work tile,
    block, cursor)."""
    cfg, rank = context.cfg, context.args.order.rank
    queue = Queue.first(context, "load")
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            block_iter = work.block_iter
            start = block_iter.start()
            load_k(context, work, block_iter.block(start), k)
            k = k.next()
            for consumer in cutlass.range_constexpr(cfg.consumers):
                q[consumer].wait()
                load_q(context, work, row_tile(cfg, work, rank, consumer), q[consumer])
            for i in cutlass.range(work.count - 1, unroll=1):
                load_k(context, work, block_iter.block(block_iter.ahead(start, i + 1)), k)
                k = k.next()
                load_v(context, work, block_iter.block(block_iter.ahead(start, i)), v)
                v = v.next()
            load_v(context, work, block_iter.block(block_iter.ahead(start, work.count - 1)), v)
            v = v.next()
            q = [cursor.next() for cursor in q]
        queue = queue.next()
    # All loads are consumed before the CTA ends: compute waits for the products that read them.


def load_q(context: Any, work: Work, tile: Int32, cursor: Cursor):
    """Load 64 rows of Q, the `tile`-th of the sequence, into a free stage."""
    cfg, tma = context.cfg, context.tma("q")
    q = sequence_matrix(tma.tensor, work.head, work.batch, work.q, cfg.varlen)
    dtype = cfg.dtype if tma.tile.bits == cfg.dtype.width else Uint8
    ptr = context.smem.pointer("Q", dtype) + cursor.stage * (8 * cfg.q_step // tma.tile.bits)
    cursor.expect_tx(tma.tile.nbytes)
    tma_load(tma, q, tile, ptr, cursor.barrier())


def load_k(context: Any, work: Work, block: Int32, cursor: Cursor):
    load_block(context, "k", work, block, cursor)


def load_v(context: Any, work: Work, block: Int32, cursor: Cursor):
    load_block(context, "v", work, block, cursor)


def load_block(context: Any, name: str, work: Work, block: Int32, cursor: Cursor, beside: int = 0):
    """Load a block of K ("k") or V ("v"). beside: bytes that the caller then loads with the same barrier."""
    cfg, tma = context.cfg, context.tma(name)
    pieces = work.keys.pieces_of(tma.tensor, work.head_kv, block, cfg.tile_n, cfg.pieces, cfg.seq_bounded_k)
    region = f"{name.upper()} bytes" if cfg.converts_kv else name.upper()
    dtype = cfg.dtype if tma.tile.bits == cfg.dtype.width else Uint8
    ptr = context.smem.pointer(region, dtype) + cursor.stage * (8 * tma.tile.nbytes // tma.tile.bits)
    cursor.wait()
    cursor.expect_tx(tma.tile.nbytes + beside)
    for i, (x, tile) in enumerate(pieces):
        if cfg.ctas > 1:  # a pair has no pieces
            i = context.args.order.rank
            tile = tile * cfg.ctas + i
        tma_load(tma, x, tile, ptr, cursor.barrier(), i)
