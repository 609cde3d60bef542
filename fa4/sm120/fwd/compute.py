"""Compute role, consumers of four warps with 16 rows of the work tile each: products, softmax, store of O.

Waits:   load_compute_Q.full, load_compute_K.full, load_compute_V.full
Signals: load_compute_Q.free, load_compute_K.free, load_compute_V.free
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...core.mask import Blocks, SparseBlocks, range_blocks, sparse_blocks
from ...core.vec_io import pack_word
from ...fwd.device.consumer import Consumer
from ...fwd.device.output import out_to_global, out_to_smem, store_out, wait_stores_read, zeros_to_global
from ...fwd.device.queue import Queue
from ...fwd.device.softmax import Softmax, rescale
from ...fwd.device.work import Work
from ...fwd.variant import OutStore
from ...pipeline.cursor import Cursor, Lane, consume
from ...pipeline.fragment import ROWS_PER_THREAD, row_registers
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ..mma import N_OF_LOAD, ROWS_OF_MATRIX, BytesOfV, RowsOfB
from .block_scales import ONES, BlockScales
from .config import Sm120ForwardContext

_REGS_OF_N = 4  # accumulators of a thread for eight columns


@cute.jit
def compute(context: Sm120ForwardContext):
    cfg, ends = context.cfg, context.ends("compute")
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    consumer = WarpConsumer(context, warp // WARPS_PER_WARPGROUP)
    softmax = Softmax(context)
    q = consume(ends.load_compute_Q, Lane(consumer.index, cfg.consumers))
    k, v = consume(ends.load_compute_K), consume(ends.load_compute_V)
    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            softmax.reset(work, consumer.first_row(work))
            if const_expr(cfg.has_block_scales):
                consumer.scales.load_q(work, consumer.first_row(work))
            consumer.o.fill(0.0)
            q.wait()
            consumer.load_q_registers(q)
            if const_expr(cfg.has_block_scales):
                consumer.scales.q.pack()
            if const_expr(cfg.out_store is not OutStore.TMA_OVER_Q):
                q.arrive()
            if const_expr(cfg.has_blocks):
                k, v = loop_lists(consumer, softmax, work, sparse_blocks(work.block_iter), k, v)
            else:
                k, v = loop_band(consumer, softmax, work, consumer.blocks(work), k, v)
            norms = softmax.finish(work, consumer.first_row(work))
            if const_expr(cfg.out_store is OutStore.DIRECT):
                out_to_global(context, work, consumer, norms, 0, cfg.head_dim_v)
            else:
                out_to_smem(context, consumer, norms)
                store_out(context, work, consumer)
                wait_stores_read()
                q.arrive()
            q = q.next()
        else:
            softmax.finish_empty(work, consumer.first_row(work))
            if const_expr(not cfg.split):  # a part without keys is not read
                zeros_to_global(context, work, consumer)
        queue = queue.next()


@cute.jit
def loop_band(consumer: WarpConsumer, softmax: Softmax, work: Work, blocks: Blocks, k: Cursor, v: Cursor):
    """Iterate over the key blocks of a work tile from last to first."""
    if const_expr(consumer.trims):  # blocks that are masked for all of the consumer's rows
        for _ in cutlass.range(range_blocks(work.block_iter).stop - blocks.stop, unroll=1):
            k.wait()
            k.arrive()
            v.wait()
            v.arrive()
            k, v = k.next(), v.next()
    if const_expr(consumer.cfg.has_block_scales):
        consumer.scales.load_k(work, blocks.stop - 1)
    for i in cutlass.range(blocks.stop - blocks.full_stop, unroll=1):
        block = blocks.stop - 1 - i
        k, v = step(consumer, softmax, work, k, v, block, block - 1, True)
    for i in cutlass.range(blocks.full_stop - blocks.full_first, unroll=1):
        block = blocks.full_stop - 1 - i
        k, v = step(consumer, softmax, work, k, v, block, block - 1, False)
    if const_expr(consumer.cfg.has_left):
        for i in cutlass.range(blocks.full_first - blocks.first, unroll=1):
            block = blocks.full_first - 1 - i
            k, v = step(consumer, softmax, work, k, v, block, block - 1, True)
    return k, v


@cute.jit
def loop_lists(consumer: WarpConsumer, softmax: Softmax, work: Work, block_iter: SparseBlocks, k: Cursor, v: Cursor):
    """Iterate over the key blocks in a work tile's lists (at least one): partially masked blocks first, then unmasked
    blocks."""
    block, following = block_iter.block(Int32(0)), block_iter.block(Int32(1))  # loaded a step ahead
    for i in cutlass.range(block_iter.masked, unroll=1):
        k, v = step(consumer, softmax, work, k, v, block, following, True)
        block, following = following, block_iter.block(i + 2)
    for i in cutlass.range(block_iter.masked, block_iter.count, unroll=1):
        k, v = step(consumer, softmax, work, k, v, block, following, False)
        block, following = following, block_iter.block(i + 2)
    return k, v


class WarpConsumer(Consumer):
    """Operands and registers of a warp of a consumer; created once."""

    def __init__(self, context: Sm120ForwardContext, index: Int32):
        cfg, smem = context.cfg, context.smem
        self.cfg, self.index, self.rank = cfg, index, Int32(0)
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
        self.q_ptr = smem.pointer("Q", cfg.operand_dtype)
        self.q = cute.make_rmem_tensor(cfg.q_regs, Int32)
        self.o = cute.make_rmem_tensor(cfg.o_columns // 2, Float32)
        self.k_address, self.v_address = smem.address("K"), smem.address("V")
        self.k = RowsOfB(cfg.k_tile)
        self.v = BytesOfV(cfg.v_tile) if cfg.operands is not None else RowsOfB(cfg.v_tile, transposed=True)
        self.scales: Any = BlockScales(context) if cfg.has_block_scales else None
        if cfg.out_store is not OutStore.DIRECT:
            self.out = smem.pointer("O", cfg.dtype) + (index * (cfg.q_step // 2) + self.warp * (cfg.o_tile.nbytes // 2))

    def scores(self, s: cute.Tensor, k: Cursor) -> None:
        """S = Q K^T."""
        cfg, mma, scales = self.cfg, self.cfg.mma, self.scales
        address = self.k_address + k.stage * cfg.k_tile.nbytes
        if scales is not None:
            scales.k.pack()
        s.fill(0.0)
        for step in range(mma.steps(cfg.head_dim)):
            q = [self.q[4 * step + i] for i in range(4)]
            q_scale = None if scales is None else scales.of_q(step)
            for n in range(0, cfg.tile_n, N_OF_LOAD):
                for i, operand in enumerate(self.k.load(address, step, n)):
                    first = n + i * ROWS_OF_MATRIX
                    k_scale = None if scales is None else scales.of_k(step, first)
                    self._add(s, first, q, operand, q_scale, k_scale)

    def add_values(self, p: cute.Tensor, v: Cursor) -> None:
        """O += P V."""
        cfg, mma, scales = self.cfg, self.cfg.mma, self.scales
        address = self.v_address + v.stage * cfg.v_tile.nbytes
        if scales is not None:
            scales.v.pack()
        for step in range(mma.steps(cfg.tile_n)):
            packed, p_scale = self._packed(p, step), None if scales is None else ONES
            for n in range(0, cfg.o_columns, N_OF_LOAD):
                for i, operand in enumerate(self.v.load(address, step, n)):
                    first = n + i * ROWS_OF_MATRIX
                    v_scale = None if scales is None else scales.of_v(step, first)
                    self._add(self.o, first, packed, operand, p_scale, v_scale)

    def _packed(self, p: cute.Tensor, step: int) -> list[Int32]:
        """Operand A of a step over keys: of each half of the step, a word of each row."""
        numbers = 32 // self.cfg.v_dtype.width
        words = []
        for half in range(2):
            for r in range(ROWS_PER_THREAD):
                first = (2 * step + half) * numbers
                registers = row_registers(2 * cute.size(p), r)[first : first + numbers]
                words.append(pack_word([p[i] for i in registers], self.cfg.v_dtype))
        return words

    def _add(self, c: cute.Tensor, n: int, a: list[Int32], b: list[Int32], a_scale, b_scale) -> None:
        """Add to the accumulators of columns n to n + 7."""
        first = n // ROWS_OF_MATRIX * _REGS_OF_N
        sums = self.cfg.mma.add([c[first + i] for i in range(_REGS_OF_N)], a, b, a_scale, b_scale)
        for i, x in enumerate(sums):
            c[first + i] = x


def step(
    consumer: WarpConsumer,
    softmax: Softmax,
    work: Work,
    k: Cursor,
    v: Cursor,
    block: Int32,
    following: Int32,
    is_masked: bool,
) -> tuple[Cursor, Cursor]:
    """Process a key block. following: the next one, whose scales of K are loaded early."""
    cfg, scales = consumer.cfg, consumer.scales
    s = cute.make_rmem_tensor(cfg.tile_n // 2, Float32)
    scores = softmax.block_scores(s, block)
    if scales is not None:
        scales.load_v(work, block)
    k.wait()
    consumer.scores(s, k)
    k.arrive()
    if scales is not None:
        scales.load_k(work, cutlass.max(following, 0))
    has_grown = softmax.softmax_step(s, scores, is_masked)
    rescale(consumer.o, softmax.factor, has_grown)
    v.wait()
    consumer.add_values(s, v)
    v.arrive()
    return k.next(), v.next()
