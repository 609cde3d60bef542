"""Load role, one warp: TMA loads of Q, K and the transposed V, in the order in which the products read them.

Waits:   load_compute_Q.free, load_compute_K.free, load_compute_V.free
Signals: load_compute_Q.full, load_compute_K.full, load_compute_V.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8

from ....core.sequence import Rows, sequence_matrix
from ....fwd.device.work import Work
from ....pipeline.cursor import Cursor, Lane, produce
from ....pipeline.tma import tma_load, tma_load_panel
from ..work import Queue, row_tile
from .config import CONSUMERS, Fp8Context


@cute.jit
def load(context: Fp8Context):
    cfg, ends = context.cfg, context.ends("load")
    q = [produce(ends.load_compute_Q, Lane(consumer, CONSUMERS)) for consumer in range(CONSUMERS)]
    k, v = produce(ends.load_compute_K), produce(ends.load_compute_V)
    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            block_iter = work.block_iter
            start = block_iter.start()
            k = load_k(context, work, block_iter.block(start), k)
            for consumer in cutlass.range_constexpr(CONSUMERS):
                q[consumer].wait()
                load_q(context, work, row_tile(cfg, work, Int32(0), consumer), q[consumer])
            for i in cutlass.range(work.count - 1, unroll=1):
                k = load_k(context, work, block_iter.block(block_iter.ahead(start, i + 1)), k)
                v = load_v(context, work, block_iter.block(block_iter.ahead(start, i)), v)
            v = load_v(context, work, block_iter.block(block_iter.ahead(start, work.count - 1)), v)
            q = [cursor.next() for cursor in q]
        queue = queue.next()
    # All loads are consumed before the CTA ends: compute waits for the products that read them.


def load_q(context: Fp8Context, work: Work, tile: Int32, cursor: Cursor) -> None:
    cfg, tma = context.cfg, context.tma("q")
    q = sequence_matrix(tma.tensor, work.head, work.batch, work.q, cfg.varlen)
    cursor.expect_tx(tma.tile.nbytes)
    tma_load(tma, q, tile, context.smem.pointer("Q", Uint8) + cursor.stage * cfg.q_step, cursor.barrier())


def load_k(context: Fp8Context, work: Work, block: Int32, k: Cursor) -> Cursor:
    cfg, tma = context.cfg, context.tma("k")
    ((matrix, tile),) = work.keys.pieces_of(tma.tensor, work.head_kv, block, cfg.tile_n, 1, False)
    k.wait()
    k.expect_tx(tma.tile.nbytes)
    tma_load(tma, matrix, tile, context.smem.pointer("K", Uint8) + k.stage * tma.tile.nbytes, k.barrier())
    return k.next()


def load_v(context: Fp8Context, work: Work, block: Int32, v: Cursor) -> Cursor:
    tma = context.tma("v")
    columns = sequence_matrix(tma.tensor, work.head_kv, work.batch, Rows(Int32(0), Int32(0)), False)
    v.wait()
    v.expect_tx(tma.tile.nbytes)
    pointer = context.smem.pointer("V", Uint8) + v.stage * tma.tile.nbytes
    tma_load_panel(tma, columns, Int32(0), block, pointer, v.barrier())
    return v.next()
