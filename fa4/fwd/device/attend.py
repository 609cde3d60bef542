"""Iteration of a consumer over its work tiles and their key blocks.

Per key block, S = Q K^T of this block and O += P V of the previous block are issued together, in ping-pong order of the
consumers. Then softmax turns S into the next P. See `consumer.Consumer` for what a chip's consumer offers.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ...core.mask import Blocks, SparseBlocks, range_blocks, sparse_blocks
from ...pipeline.cursor import Cursor
from ..launch import ForwardContext
from ..variant import OutStore
from .consumer import Consumer
from .only_block import only_block
from .output import out_to_global, out_to_smem, store_out, wait_stores_read, zeros_to_global
from .queue import Queue
from .softmax import Softmax
from .work import Work


@cute.jit
def attend(context: ForwardContext, consumer: Consumer, softmax: Softmax, q: Cursor, k: Cursor, v: Cursor):
    """Compute and store the consumer's rows of all work tiles of the CTA."""
    cfg: Any = context.cfg
    consumer.ping_pong.start()
    if const_expr(not cfg.one_block):
        consumer.o.fill(0.0)

    queue = Queue.first(context, "compute")
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            softmax.reset(work, consumer.first_row(work))
            consumer.begin(work)
            q.wait()
            if const_expr(cfg.holds_q):
                consumer.load_q_registers(q)
                if const_expr(cfg.out_store is not OutStore.TMA_OVER_Q):
                    q.arrive()
            if const_expr(cfg.has_blocks):
                k, v = loop_lists(consumer, softmax, work, sparse_blocks(work.block_iter), q, k, v)
                has_o = Boolean(work.count > 1)
            elif const_expr(cfg.one_block):
                k, has_o = only_block(consumer, softmax, work, q, k), Boolean(False)
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
def skip_blocks(consumer: Consumer, count: Int32, k: Cursor, v: Cursor):
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
def loop_band(consumer: Consumer, softmax: Softmax, work: Work, blocks: Blocks, q: Cursor, k: Cursor, v: Cursor):
    """Iterate over the key blocks of a work tile from last to first: P of each block, O of the block before."""
    last = blocks.stop - 1
    consumer.prefetch_k(work, last)
    if consumer.is_second_half_masked(work, blocks):
        k = first_block(consumer, softmax, work, q, k, last, last - 1, is_half=True)
    else:
        k = first_block(consumer, softmax, work, q, k, last, last - 1)
    has_o = Int32(0)
    for i in cutlass.range(cutlass.max(last - blocks.full_stop, 0), unroll=1):
        block = last - 1 - i
        k, v = step(consumer, softmax, work, q, k, v, block, block - 1, Boolean(has_o != 0), True)
        has_o = Int32(1)
    full_stop = cutlass.min(last, blocks.full_stop)
    for i in cutlass.range(full_stop - blocks.full_first, unroll=1):
        k, v = step(
            consumer, softmax, work, q, k, v, full_stop - 1 - i, full_stop - 1 - i - 1, Boolean(has_o != 0), False
        )
        has_o = Int32(1)
    if const_expr(consumer.cfg.has_left):
        full_first = cutlass.min(last, blocks.full_first)
        for i in cutlass.range(full_first - blocks.first, unroll=1):
            k, v = step(
                consumer, softmax, work, q, k, v, full_first - 1 - i, full_first - 1 - i - 1, Boolean(has_o != 0), True
            )
            has_o = Int32(1)
    return k, v


@cute.jit
def loop_lists(
    consumer: Consumer, softmax: Softmax, work: Work, block_iter: SparseBlocks, q: Cursor, k: Cursor, v: Cursor
):
    """Iterate over the key blocks in a work tile's lists (at least one): partially masked blocks first, then unmasked
    blocks. P of each block, O of the block before."""
    block, following = block_iter.block(Int32(0)), block_iter.block(Int32(1))  # loaded a step ahead
    consumer.prefetch_k(work, block)
    if block_iter.masked > 0:
        k = first_block(consumer, softmax, work, q, k, block, following)
    else:
        k = first_block(consumer, softmax, work, q, k, block, following, is_masked=False)
    for i in cutlass.range(1, block_iter.masked, unroll=1):
        block, following = following, block_iter.block(i + 1)
        k, v = step(consumer, softmax, work, q, k, v, block, following, Boolean(i > 1), True)
    for i in cutlass.range(cutlass.max(block_iter.masked, 1), block_iter.count, unroll=1):
        block, following = following, block_iter.block(i + 1)
        k, v = step(consumer, softmax, work, q, k, v, block, following, Boolean(i > 1), False)
    return k, v


def first_block(
    consumer: Consumer,
    softmax: Softmax,
    work: Work,
    q: Cursor,
    k: Cursor,
    block: Int32,
    following: Int32,
    is_masked: bool = True,
    is_half: bool = False,
) -> Cursor:
    """Compute P of the first key block that is processed, or of its first half if the rest is masked for all of the
    consumer's rows. The keys may end in this block. following: the next block."""
    s = consumer.accumulator(is_half)
    k.wait()
    consumer.start_s(s, q, k, is_half)
    scores = softmax.block_scores(s, block)
    consumer.wait(0)
    k.arrive()
    consumer.prefetch(work, block, following)
    softmax.softmax_step(s, scores, is_masked)
    consumer.pack(s)
    return k.next()


def step(
    consumer: Consumer,
    softmax: Softmax,
    work: Work,
    q: Cursor,
    k: Cursor,
    v: Cursor,
    block: Int32,
    following: Int32,
    has_o: Boolean,
    is_masked: bool,
) -> tuple[Cursor, Cursor]:
    """Compute P of a key block while the product of the block before is added to O. following: the next block."""
    s = consumer.accumulator(False)
    k.wait()
    consumer.ping_pong.wait()
    consumer.start_s(s, q, k, False)
    v.wait()
    consumer.start_o(v, has_o)
    consumer.ping_pong.arrive_next()
    scores = softmax.block_scores(s, block)
    consumer.wait(1)
    consumer.release(k, v)
    consumer.prefetch(work, block, following)
    has_grown = softmax.softmax_step(s, scores, is_masked)
    consumer.settle(softmax, v)
    consumer.pack(s)
    consumer.rescale(softmax, has_grown)
    return k.next(), v.next()


def last_block(consumer: Consumer, v: Cursor, has_o: Boolean) -> Cursor:
    """Add the last P V to O, and wait for it."""
    v.wait()
    consumer.begin_last()
    consumer.start_o(v, has_o)
    consumer.wait(0)
    v.arrive()
    return v.next()
