"""Compute role, consumers of one warpgroup with 64 rows of the work tile each: products, softmax, store of O.

Per key block, S = Q K^T of this block and O += P V of the previous block are issued together. While the second product
runs, softmax turns S into the next P. O leaves through shared memory; each warp stores its own 16 rows. A warp waits
for its bulk store only before it writes the buffer again, and at its end.

Waits:   load_compute_Q.full, load_compute_K.full, load_compute_V.full; of 8-bit numbers
         convert_compute_K.full, convert_compute_V.full
Signals: load_compute_Q.free, load_compute_K.free, load_compute_V.free; of 8-bit numbers
         convert_compute_K.free, convert_compute_V.free
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ...core.mask import Blocks, SparseBlocks, range_blocks, sparse_blocks
from ...fwd.device.consumer import Consumer
from ...fwd.device.output import out_to_global, out_to_smem, store_out, wait_stores_read, zeros_to_global
from ...fwd.device.ping_pong import PingPong
from ...fwd.device.queue import Queue
from ...fwd.device.rows import query_of
from ...fwd.device.softmax import Softmax, pack, rescale
from ...fwd.device.work import Work
from ...fwd.variant import KvLoad, OutStore
from ...pipeline.cursor import Cursor, Lane, consume
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ..wgmma import ROWS, Wgmma, pin, wait
from .config import Sm90ForwardContext


@cute.jit
def compute(context: Sm90ForwardContext):
    cfg = context.cfg
    ends = context.ends("compute")
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    consumer = ForwardConsumer(context, warp // WARPS_PER_WARPGROUP)
    softmax = Softmax(context)
    q = consume(ends.load_compute_Q, Lane(consumer.index, cfg.consumers))
    if const_expr(cfg.converts_kv):
        k, v = consume(ends.convert_compute_K), consume(ends.convert_compute_V)
    elif const_expr(cfg.kv_load is KvLoad.GATHER):
        k, v = consume(ends.gather_compute_K), consume(ends.gather_compute_V)
    else:
        k, v = consume(ends.load_compute_K), consume(ends.load_compute_V)
    consumer.ping_pong.start()
    consumer.o.fill(0.0)

    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            softmax.reset(work, consumer.first_row(work))
            q.wait()
            if const_expr(cfg.holds_q):
                consumer.load_q_registers(q)
                if const_expr(cfg.out_store is not OutStore.TMA_OVER_Q):
                    q.arrive()
            if const_expr(cfg.has_blocks):
                k, v = loop_lists(consumer, softmax, sparse_blocks(work.block_iter), q, k, v)
                has_o = Boolean(work.count > 1)
            else:
                blocks = consumer.blocks(work)
                if const_expr(consumer.trims):
                    k, v = skip_blocks(consumer, range_blocks(work.block_iter).stop - blocks.stop, k, v)
                k, v = loop_band(consumer, softmax, work, blocks, q, k, v)
                has_o = Boolean(blocks.stop - blocks.first > 1)
            if const_expr(not (cfg.holds_q or cfg.out_store is OutStore.TMA_OVER_Q)):
                q.arrive()
            v = last_block(consumer, v, has_o)
            norms = softmax.finish(work, consumer.first_row(work))
            if const_expr(cfg.out_store is OutStore.DIRECT):
                out_to_global(context, work, consumer, norms, 0, cfg.head_dim_v)
            else:
                out_to_smem(context, consumer, norms)
                store_out(context, work, consumer)
            if const_expr(cfg.out_store is OutStore.TMA_OVER_Q):
                wait_stores_read()
                q.arrive()
            q = q.next()
        else:
            softmax.finish_empty(work, consumer.first_row(work))
            if const_expr(not cfg.split):  # a part without keys is not read
                zeros_to_global(context, work, consumer)
        queue = queue.next()
    if const_expr(cfg.out_store is OutStore.TMA):
        wait_stores_read()  # another CTA may use the shared memory after this one ends


@cute.jit
def skip_blocks(consumer: ForwardConsumer, count: Int32, k: Cursor, v: Cursor):
    """Release the first `count` key blocks of a work tile, which are masked for all of the consumer's rows."""
    for _ in cutlass.range(count, unroll=1):
        k.wait()
        consumer.ping_pong.wait()
        k.arrive()
        v.wait()
        consumer.ping_pong.arrive_next()
        v.arrive()
        k, v = k.next(), v.next()
    return k, v


@cute.jit
def loop_band(consumer: ForwardConsumer, softmax: Softmax, work: Work, blocks: Blocks, q: Cursor, k: Cursor, v: Cursor):
    """Iterate over the key blocks of a work tile from last to first: P of each block, O of the block before."""
    last = blocks.stop - 1
    if consumer.is_second_half_masked(work, blocks):
        k = first_block(consumer, softmax, consumer.half_qk, q, k, last)
    else:
        k = first_block(consumer, softmax, consumer.qk, q, k, last)
    has_o = Int32(0)
    for i in cutlass.range(cutlass.max(last - blocks.full_stop, 0), unroll=1):
        k, v = step(consumer, softmax, q, k, v, last - 1 - i, Boolean(has_o != 0), True)
        has_o = Int32(1)
    full_stop = cutlass.min(last, blocks.full_stop)
    for i in cutlass.range(full_stop - blocks.full_first, unroll=1):
        k, v = step(consumer, softmax, q, k, v, full_stop - 1 - i, Boolean(has_o != 0), False)
        has_o = Int32(1)
    if const_expr(consumer.cfg.has_left):
        full_first = cutlass.min(last, blocks.full_first)
        for i in cutlass.range(full_first - blocks.first, unroll=1):
            k, v = step(consumer, softmax, q, k, v, full_first - 1 - i, Boolean(has_o != 0), True)
            has_o = Int32(1)
    return k, v


@cute.jit
def loop_lists(consumer: ForwardConsumer, softmax: Softmax, block_iter: SparseBlocks, q: Cursor, k: Cursor, v: Cursor):
    """Iterate over the key blocks in a work tile's lists (at least one): partially masked blocks first, then unmasked
    blocks. P of each block, O of the block before."""
    block, following = block_iter.block(Int32(0)), block_iter.block(Int32(1))  # loaded a step ahead
    if block_iter.masked > 0:
        k = first_block(consumer, softmax, consumer.qk, q, k, block)
    else:
        k = first_block(consumer, softmax, consumer.qk, q, k, block, False)
    for i in cutlass.range(1, block_iter.masked, unroll=1):
        block, following = following, block_iter.block(i + 1)
        k, v = step(consumer, softmax, q, k, v, block, Boolean(i > 1), True)
    for i in cutlass.range(cutlass.max(block_iter.masked, 1), block_iter.count, unroll=1):
        block, following = following, block_iter.block(i + 1)
        k, v = step(consumer, softmax, q, k, v, block, Boolean(i > 1), False)
    return k, v


class ForwardConsumer(Consumer):
    """Operands and registers of one consumer; created once."""

    def __init__(self, context: Sm90ForwardContext, index: Int32):
        cfg, smem = context.cfg, context.smem
        self.cfg, self.index, self.ping_pong = cfg, index, PingPong(cfg.consumers, index, cfg.ping_pong)
        self.rank = context.args.order.rank
        self.qk, self.pv = cfg.qk, cfg.pv
        self.half_qk = replace(self.qk, n=cfg.half_n)
        self.q_ptr = smem.pointer("Q", cfg.dtype)
        self.q = self.qk.a_registers() if cfg.holds_q else self.qk.a_at(self.q_ptr)
        self.k, self.v = self.qk.b_at(smem.pointer("K", cfg.dtype)), self.pv.b_at(smem.pointer("V", cfg.v_dtype))
        self.o, self.p = self.pv.accumulator(), self.pv.a_registers()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        if cfg.out_store is not OutStore.DIRECT:
            self.out = smem.pointer("O", cfg.dtype) + (index * (cfg.o_step // 2) + warp * (cfg.o_tile.nbytes // 2))
        self.warp = warp

    def is_second_half_masked(self, work: Work, blocks: Blocks) -> Boolean:
        """True if the second half of the last key block is masked for all of the consumer's rows."""
        last_row = (self.row_tile(work) + 1) * ROWS - 1
        _, stop = work.mask.keys(query_of(self.cfg, last_row))
        return Boolean(stop - (blocks.stop - 1) * self.cfg.tile_n <= self.cfg.half_n)

    def start_s(self, product: Wgmma, s: cute.Tensor, q: Cursor, k: Cursor) -> None:
        """Start S = Q K^T, or only its first half."""
        q_rows = self.q if self.cfg.holds_q else self.q[None, None, None, q.stage]
        product.issue(s, q_rows, self.k[None, None, None, k.stage], False)

    def start_o(self, v: Cursor, has_o: Boolean) -> None:
        """Start O += P V; without `has_o`, O = P V."""
        self.pv.issue(self.o, self.p, self.v[None, None, None, v.stage], has_o)


def first_block(
    consumer: ForwardConsumer,
    softmax: Softmax,
    product: Wgmma,
    q: Cursor,
    k: Cursor,
    block: Int32,
    is_masked: bool = True,
) -> Cursor:
    """Compute P of the first key block that is processed, or of its first half if the rest is masked for all of the
    consumer's rows. The keys may end in this block."""
    s = product.accumulator()
    k.wait()
    consumer.start_s(product, s, q, k)
    scores = softmax.block_scores(s, block)
    wait(0)
    k.arrive()
    softmax.softmax_step(s, scores, is_masked)
    pack(s, consumer.p)
    return k.next()


def step(
    consumer: ForwardConsumer,
    softmax: Softmax,
    q: Cursor,
    k: Cursor,
    v: Cursor,
    block: Int32,
    has_o: Boolean,
    is_masked: bool,
) -> tuple[Cursor, Cursor]:
    """Compute P of a key block while the product of the block before is added to O."""
    s = consumer.qk.accumulator()
    k.wait()
    consumer.ping_pong.wait()
    consumer.start_s(consumer.qk, s, q, k)
    v.wait()
    consumer.start_o(v, has_o)
    consumer.ping_pong.arrive_next()
    scores = softmax.block_scores(s, block)
    wait(1)
    k.arrive()
    has_grown = softmax.softmax_step(s, scores, is_masked)
    pin(softmax.total[0], softmax.total[1])
    wait(0)
    v.arrive()
    pack(s, consumer.p)
    rescale(consumer.o, softmax.factor, has_grown)
    return k.next(), v.next()


def last_block(consumer: ForwardConsumer, v: Cursor, has_o: Boolean) -> Cursor:
    """Add the last P V to O, and wait for it."""
    v.wait()
    consumer.start_o(v, has_o)
    wait(0)
    v.arrive()
    return v.next()
