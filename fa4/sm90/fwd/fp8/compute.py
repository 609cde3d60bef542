"""Compute role, consumers of one warpgroup with 64 rows of the work tile each: products, softmax, sums and store of O.

Key blocks are computed in halves: S = Q K^T of a half and P V of the half before are issued together. While the second
product runs, softmax turns S into the next P. One consumer after the other computes its exponentials, so the products
and maxima of the others overlap with them. O leaves through shared memory; each warp stores its own 16 rows.

Waits:   load_compute_Q.full, load_compute_K.full, load_compute_V.full
Signals: load_compute_Q.free, load_compute_K.free, load_compute_V.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ....core.mask import range_blocks
from ....fwd.device.consumer import ConsumerRows
from ....fwd.device.output import out_to_smem, store_out, wait_stores_read, zeros_to_global
from ....fwd.device.ping_pong import PingPong
from ....fwd.device.queue import Queue
from ....fwd.device.work import Work
from ....pipeline.cursor import Cursor, Lane, consume
from ....pipeline.roles import WARPS_PER_WARPGROUP
from ....pipeline.smem import PANEL_ROW_BYTES
from ...wgmma_order import pin, wait
from .context import Fp8Context
from .softmax import Fp8Softmax
from .sums import PERIOD, NarrowSums, Sums


@cute.jit
def compute(context: Fp8Context):
    ends = context.ends("compute")
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    consumer = Fp8Consumer(context, warp // WARPS_PER_WARPGROUP)
    softmax = Fp8Softmax(context)
    q = consume(ends.load_compute_Q, Lane(consumer.index, context.cfg.consumers))
    k, v = consume(ends.load_compute_K), consume(ends.load_compute_V)
    consumer.ping_pong.start()
    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            softmax.reset(work, consumer.first_row(work))
            consumer.sums.reset()
            q.wait()
            k, v = loop(consumer, softmax, work, q, k, v)
            q.arrive()
            norms = softmax.finish(work, consumer.first_row(work))
            out_to_smem(context, consumer, norms)
            store_out(context, work, consumer)
            q = q.next()
        else:
            softmax.finish_empty(work, consumer.first_row(work))
            zeros_to_global(context, work, consumer)
        queue = queue.next()
    wait_stores_read()  # another CTA may use the shared memory after this one ends


@cute.jit
def loop(consumer: Fp8Consumer, softmax: Fp8Softmax, work: Work, q: Cursor, k: Cursor, v: Cursor):
    """Iterate over the key blocks of a work tile from last to first, in halves, the lower one first. A step begins with
    P of the lower half of its block."""
    blocks = range_blocks(work.block_iter)
    last = blocks.stop - 1
    first_half(consumer, softmax, q, k, last)
    stop = cutlass.max(blocks.full_stop, blocks.first + 1)
    for i in cutlass.range(cutlass.max(last + 1 - stop, 0), unroll=1):
        k, v = step(consumer, softmax, q, k, v, last - i, True)
    stop = cutlass.min(last + 1, stop)
    full_first = cutlass.min(blocks.full_first, stop - 1) if const_expr(consumer.cfg.has_left) else blocks.first
    count = stop - 1 - full_first
    parts = cutlass.max(cute.ceil_div(count, PERIOD), 1)
    for part in cutlass.range(parts, unroll=1):
        for i in cutlass.range(part * PERIOD, cutlass.min(part * PERIOD + PERIOD, count), unroll=1):
            k, v = step(consumer, softmax, q, k, v, stop - 1 - i, False)
        consumer.sums.add_part(part, parts)
    if const_expr(consumer.cfg.has_left):
        for i in cutlass.range(full_first - blocks.first, unroll=1):
            k, v = step(consumer, softmax, q, k, v, full_first - i, True)
    k, v = last_half(consumer, softmax, q, k, v, blocks.first)
    consumer.sums.finish(parts)
    return k, v


class Fp8Consumer(ConsumerRows):
    """Operands and registers of one consumer; created once."""

    def __init__(self, context: Fp8Context, index: Int32):
        cfg, smem = context.cfg, context.smem
        self.cfg, self.index, self.ping_pong = cfg, index, PingPong(cfg.consumers, index, True)
        self.rank = Int32(0)
        self.qk, self.pv = cfg.qk, cfg.pv
        self.q = self.qk.a_at(smem.pointer("Q", self.qk.dtype))
        keys = smem.pointer("K", self.qk.dtype)
        self.k = [self.qk.b_at(keys + half * cfg.half_n * PANEL_ROW_BYTES) for half in range(2)]
        self.v = self.pv.b_at(smem.pointer("V", self.pv.dtype))
        self.s, self.o, self.p = self.qk.accumulator(), self.pv.accumulator(), self.pv.a_registers()
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        place = (index * WARPS_PER_WARPGROUP + self.warp) * cfg.bytes_of_sums
        self.sums = (NarrowSums if cfg.has_narrow_sums else Sums)(self.o, smem.address("sums of O") + place)
        self.out = smem.pointer("sums of O", cfg.dtype) + place // 2

    def start_s(self, half: int, q: Cursor, k: Cursor) -> None:
        """Start S = Q K^T of half a block."""
        self.qk.issue(self.s, self.q[None, None, None, q.stage], self.k[half][None, None, None, k.stage], False)

    def start_o(self, half: int, v: Cursor) -> None:
        """Start O += P V of half a block."""
        self.pv.issue(self.o, self.p, self.v[None, None, None, v.stage], True, b_first=half * self.pv.steps)

    def weights(self, softmax: Fp8Softmax, half: int, block: Int32, is_masked: bool) -> Boolean:
        """Turn S of half a block into P, before rounding. Returns whether O must be rescaled."""
        scores = softmax.block_scores(self.s, block, half * self.cfg.half_n)
        rows = softmax.masked_scores(self.s, scores, is_masked)
        has_grown = softmax.raise_maxima(softmax.maxima(rows))
        self.ping_pong.wait()
        softmax.exponentials(self.s, rows, scores, is_masked)
        pin(softmax.total[0], softmax.total[1])
        self.ping_pong.arrive_next()
        return has_grown


def first_half(consumer: Fp8Consumer, softmax: Fp8Softmax, q: Cursor, k: Cursor, block: Int32) -> None:
    """Compute P of the lower half of the first key block; the keys may end in it."""
    k.wait()
    consumer.start_s(0, q, k)
    wait(0)
    consumer.weights(softmax, 0, block, True)
    pack_weights(softmax, consumer.s, consumer.p)


def step(
    consumer: Fp8Consumer,
    softmax: Fp8Softmax,
    q: Cursor,
    k: Cursor,
    v: Cursor,
    block: Int32,
    is_masked: bool,
) -> tuple[Cursor, Cursor]:
    """Compute P of the upper half of a key block, then of the lower half of the next one."""
    v.wait()
    k = upper_half(consumer, softmax, q, k, v, block, is_masked)
    k.wait()
    consumer.start_s(0, q, k)
    consumer.start_o(1, v)
    wait(1)
    has_grown = consumer.weights(softmax, 0, block - 1, is_masked)
    wait(0)
    v.arrive()
    consumer.sums.rescale(softmax.factor, has_grown)
    pack_weights(softmax, consumer.s, consumer.p)
    return k, v.next()


def upper_half(
    consumer: Fp8Consumer, softmax: Fp8Softmax, q: Cursor, k: Cursor, v: Cursor, block: Int32, is_masked: bool
) -> Cursor:
    """Compute P of the upper half of a key block, and release its keys."""
    consumer.start_s(1, q, k)
    consumer.start_o(0, v)
    wait(1)
    k.arrive()
    has_grown = consumer.weights(softmax, 1, block, is_masked)
    wait(0)
    consumer.sums.rescale(softmax.factor, has_grown)
    pack_weights(softmax, consumer.s, consumer.p)
    return k.next()


def last_half(
    consumer: Fp8Consumer, softmax: Fp8Softmax, q: Cursor, k: Cursor, v: Cursor, block: Int32
) -> tuple[Cursor, Cursor]:
    """Compute P of the upper half of the last block, and add both halves' products to O."""
    v.wait()
    k = upper_half(consumer, softmax, q, k, v, block, True)
    consumer.start_o(1, v)
    wait(0)
    v.arrive()
    return k, v.next()


def pack_weights(softmax: Fp8Softmax, s: cute.Tensor, p: cute.Tensor) -> None:
    """Round P to e4m3 into the next product's operand. Of 16 keys, a thread of a row has pairs 2t, 2t + 1 and 2t + 8,
    2t + 9, where the operand has keys 4t to 4t + 3: V's keys are in that order, see `fwd.kernels.transpose`."""
    packed = cute.recast_tensor(p, Int32)
    for i in range(cute.size(packed)):
        packed[i] = softmax.packed(s, i % 2, i // 2)
