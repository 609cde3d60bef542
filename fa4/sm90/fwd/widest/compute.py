"""Compute role, a warpgroup for 64 rows: S and P of every second key block, O += P V of all for half of the columns.

Waits:   load_compute_Q.full, load_compute_KV.full, compute_peer_P.full, compute_peer_P.free, compute_peer_maxima.full
Signals: load_compute_KV.free, compute_peer_P.full, compute_peer_P.free, compute_peer_maxima.full
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ....core.constant import Constant
from ....core.fragment_coords import reduce_row
from ....core.mask import SparseBlocks
from ....fwd.device.output import out_to_global, zeros_to_global
from ....fwd.device.softmax import BlockScores, Softmax, reduce_in_chains, rescale
from ....fwd.device.work import Work, work_tile
from ....pipeline.cursor import Cursor, Lane, consume, produce
from ....pipeline.fragment import LANES_PER_ROW, ROWS_PER_THREAD, pack_pairs, row_registers
from ....pipeline.roles import ROWS_PER_WARP, WARPS_PER_WARPGROUP
from ...wgmma import ROWS
from ...wgmma_order import wait
from .config import CONSUMERS
from .context import WidestContext
from .exchange import Exchange
from .load import nth_block


class Consumer(Constant):
    """Operands and registers of a consumer.

    scores: masked, of the current block. next_scores: S of the next one while it is computed. maxima: of the rows of
    `scores`.
    """

    def __init__(self, context: WidestContext) -> None:
        cfg, smem = context.cfg, context.smem
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        self.context, self.cfg, self.rank = context, cfg, context.args.order.rank
        self.index, self.warp = warp // WARPS_PER_WARPGROUP, warp % WARPS_PER_WARPGROUP
        self.qk, self.pv = cfg.qk, cfg.pv
        q, kv, p, p_of_peer = (smem.pointer(name, cfg.dtype) for name in ("Q", "KV", "P", "P of peer"))
        self.q, self.k, self.v = self.qk.a_at(q), self.qk.b_at(kv), self.pv.b_at(kv)
        self.p, self.p_of_peer = self.pv.a_at(p), self.pv.a_at(p_of_peer)
        self.o, self.scores, self.next_scores = self.pv.accumulator(), self.qk.accumulator(), self.qk.accumulator()
        self.maxima = cute.make_rmem_tensor(ROWS_PER_THREAD, Float32)
        self.softmax, self.exchange = Softmax(context), Exchange(context, self.index, self.warp)

    def first_row(self, work: Work) -> Int32:
        return (work.m_block * CONSUMERS + self.index) * ROWS + self.warp * ROWS_PER_WARP

    def start_s(self, kv: Cursor, parts: range) -> Cursor:
        """Start S = Q K^T for these parts of the columns, as they arrive."""
        q = self.q[None, None, None, self.index]
        for part in parts:
            steps = self.cfg.k_steps(part)
            kv.wait()
            k = self.k[None, None, None, kv.stage]
            self.qk.issue(self.next_scores, q, k, part > 0, steps, b_first=-steps.start)
            kv = kv.next()
        return kv

    def start_o(self, kv: Cursor, p: cute.Tensor, parts: range) -> Cursor:
        """Start O += P V for these parts of the keys of a CTA, as V arrives."""
        for part in parts:
            steps = self.cfg.v_steps(part)
            kv.wait()
            v = self.v[None, None, None, kv.stage]
            self.pv.issue(self.o, p[None, None, None, self.index], v, True, steps, b_first=-steps.start)
            kv = kv.next()
        return kv

    def take_scores(self, work: Work, step: Int32, sent: Cursor) -> None:
        """Mask S of the CTA's block of a step, and send the maxima of its rows to the peer."""
        softmax, n = self.softmax, self.cfg.ctas * step + self.rank
        scores = softmax.block_scores(self.next_scores, nth_block(work, n))
        exists = Boolean(n < work.count)
        blocks = work.block_iter
        is_masked = Boolean(n < blocks.masked) if isinstance(blocks, SparseBlocks) else True
        for r, row in enumerate(softmax.masked_scores(self.next_scores, scores, is_masked)):
            row = [Float32(cutlass.select_(exists, x, -Float32.inf)) for x in row]
            for i, x in zip(row_registers(self.cfg.tile_n, r), row):
                self.scores[i] = x
            self.maxima[r] = reduce_row(reduce_in_chains(row, cute.arch.fmax), cute.arch.fmax)
        self.exchange.send_row_values(self.maxima, sent)

    def softmax_step(self, maxima_of_peer: list[Float32], p: Cursor) -> Boolean:
        """P, from `scores`, to shared memory and to the peer. Returns True if O must be multiplied by the softmax's
        factor."""
        rows = [[self.scores[i] for i in row_registers(self.cfg.tile_n, r)] for r in range(ROWS_PER_THREAD)]
        maxima = [cute.arch.fmax(self.maxima[r], x) for r, x in enumerate(maxima_of_peer)]
        has_grown = self.softmax.weights(self.scores, rows, maxima, BlockScores(Int32(0), None, None, None), True)
        self.exchange.send_p(pack_pairs(self.scores, [Float32(1.0)] * ROWS_PER_THREAD, self.cfg.dtype), p)
        return has_grown


@cute.jit
def compute(context: WidestContext):
    consumer = Consumer(context)
    work = work_tile(context, Int32(cute.arch.block_idx()[0]) // context.cfg.ctas)
    if work.count > 0:
        consumer.softmax.reset(work, consumer.first_row(work))
        attend(consumer, work)
        store_out(context, work, consumer, consumer.softmax.finish(work, consumer.first_row(work), consumer.rank == 0))
    else:
        if consumer.rank == 0:
            consumer.softmax.finish_empty(work, consumer.first_row(work))
            if const_expr(not context.cfg.split):  # a part without keys is not read
                zeros_to_global(context, work, consumer)


class Cursors(NamedTuple):
    """Positions in the channels."""

    kv: Cursor
    p: Cursor
    p_of_peer: Cursor
    maxima: Cursor
    maxima_of_peer: Cursor


@cute.jit
def attend(consumer: Consumer, work: Work):
    """O and softmax of all key blocks, from last to first, two at a time."""
    ends, lane = consumer.context.ends("compute"), Lane(consumer.index, CONSUMERS)
    p, maxima = produce(ends.compute_peer_P, lane), produce(ends.compute_peer_maxima, lane)
    p_of_peer, maxima_of_peer = consume(ends.compute_peer_P, lane), consume(ends.compute_peer_maxima, lane)
    consumer.o.fill(0.0)
    consume(ends.load_compute_Q, lane).wait()
    kv, parts = consume(ends.load_compute_KV), len(consumer.cfg.parts_of_k)
    for half in (range(consumer.cfg.first_parts_of_k), range(consumer.cfg.first_parts_of_k, parts)):
        first, kv = kv, consumer.start_s(kv, half)
        wait(0)
        release(first, len(half))
    consumer.take_scores(work, Int32(0), maxima)
    cursors = Cursors(kv, p, p_of_peer, maxima.next(), maxima_of_peer)
    steps = (work.count + consumer.cfg.ctas - 1) // consumer.cfg.ctas
    for step in cutlass.range(1, steps, unroll=1):
        cursors = inner_step(consumer, work, step, cursors)
    last_step(consumer, cursors)


def inner_step(consumer: Consumer, work: Work, next_step: Int32, cursors: Cursors) -> Cursors:
    """P of the CTA's block; add the blocks of both CTAs to O; scores of the next step.

    Nothing is in flight between steps: ptxas would serialise all products. The other consumer's products fill the gap.
    """
    cfg, exchange = consumer.cfg, consumer.exchange
    kv, p, p_of_peer, maxima, maxima_of_peer = cursors
    half, parts, parts_of_v = cfg.first_parts_of_k, len(cfg.parts_of_k), cfg.parts_of_v
    second = consumer.start_s(kv, range(half))
    has_grown = consumer.softmax_step(exchange.row_values_of_peer(maxima_of_peer), p)
    wait(0)
    release(kv, half)
    own = consumer.start_s(second, range(half, parts))
    rescale(consumer.o, consumer.softmax.factor, has_grown)
    kv = consumer.start_o(own, consumer.p, range(1))
    wait(1)
    release(second, parts - half)
    others = consumer.start_o(kv, consumer.p, range(1, parts_of_v))
    p_of_peer.wait()
    consumer.take_scores(work, next_step, maxima)
    kv = consumer.start_o(others, consumer.p_of_peer, range(1))
    wait(1)
    release(own, parts_of_v)
    kv = consumer.start_o(kv, consumer.p_of_peer, range(1, parts_of_v))
    wait(0)
    release(others, parts_of_v)
    p_of_peer.arrive()
    return Cursors(kv, p.next(), p_of_peer.next(), maxima.next(), maxima_of_peer.next())


def last_step(consumer: Consumer, cursors: Cursors) -> None:
    """The same without a next step. Then exchange the rows' sums of P."""
    exchange, softmax = consumer.exchange, consumer.softmax
    kv, p, p_of_peer, maxima, maxima_of_peer = cursors
    has_grown = consumer.softmax_step(exchange.row_values_of_peer(maxima_of_peer), p)
    rescale(consumer.o, softmax.factor, has_grown)
    parts_of_v = range(consumer.cfg.parts_of_v)
    own, kv = kv, consumer.start_o(kv, consumer.p, parts_of_v)
    p_of_peer.wait()
    wait(0)
    release(own, len(parts_of_v))
    consumer.start_o(kv, consumer.p_of_peer, parts_of_v)
    for r in range(ROWS_PER_THREAD):
        softmax.total[r] = reduce_row(softmax.total[r], lambda a, b: a + b)
    exchange.send_row_values(softmax.total, maxima)
    is_first = cute.arch.lane_idx() % LANES_PER_ROW == 0
    for r, total in enumerate(exchange.row_values_of_peer(maxima_of_peer.next())):
        # `finish` adds those of four threads.
        softmax.total[r] = Float32(cutlass.select_(is_first, softmax.total[r] + total, Float32(0.0)))
    wait(0)


def release(kv: Cursor, count: int) -> None:
    """Release `count` parts, whose products are done."""
    for _ in range(count):
        kv.arrive()
        kv = kv.next()


@cute.jit
def store_out(context: WidestContext, work: Work, consumer: Consumer, norms: list[Float32]):
    """Store the CTA's columns of O."""
    half, columns = context.cfg.half_columns, context.cfg.head_dim_v
    if consumer.rank == 0:
        out_to_global(context, work, consumer, norms, 0, min(half, columns))
    else:
        if const_expr(columns > half):
            out_to_global(context, work, consumer, norms, half, columns - half)
