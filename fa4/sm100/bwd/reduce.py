"""Reduce role, four warps: adds each step's dQ to its float32 accumulator in global memory.

A thread has one query. Chunks of columns go through two stages of shared memory, in the accumulator's own order, so
that one bulk addition of contiguous bytes takes a chunk.

Waits:   mma_reduce_dQ.full
Signals: mma_reduce_dQ.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import tmem
from ..bulk import bulk_add
from ..copy import bits, lane_address, store_words, tmem_load
from .config import CHUNK, CHUNK_BYTES, DQ_STAGES, TILE_M
from .work import work_tile


@cute.jit
def reduce(context):
    cfg, args = context.cfg, context.args
    ends = context.ends("reduce")
    work = work_tile(context)
    phase = Int32(0)
    for member in cutlass.range(cfg.group, unroll=1):
        head = work.head_kv * cfg.group + member
        for m_block in cutlass.range(work.first, work.stop, unroll=1):
            ends.mma_reduce_dQ.wait_full(0, phase)
            add_to_accumulator(context, ends, args.dq_rows[None, work.row_block + m_block, head])
            phase = phase ^ 1
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def add_to_accumulator(context, ends, target: cute.Tensor):
    """One step's dQ, DQ_STAGES chunks at a time. `target`: the block's accumulator, chunk after chunk."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.thread_idx()[0] % TILE_M
    dq_address = lane_address(context.tmem.dQ, warp)
    staging = context.smem.pointer("dQ", Float32)
    chunks = context.cfg.columns // CHUNK
    for first in cutlass.range_constexpr(0, chunks, DQ_STAGES):
        batch = range(first, min(first + DQ_STAGES, chunks))
        loaded = [tmem_load(dq_address + chunk * CHUNK, CHUNK) for chunk in batch]
        tmem.wait_loads()
        if cutlass.const_expr(batch[-1] == chunks - 1):
            ends.mma_reduce_dQ.arrive_free(0)
        for chunk, dq in zip(batch, loaded):
            place = staging + chunk % DQ_STAGES * (CHUNK_BYTES // 4)
            # The stage's last addition has read it; every thread knows after the barrier.
            if warp % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(DQ_STAGES - 1, read=True)
            cute.arch.barrier(barrier_id=context.dq_staging, number_of_threads=TILE_M)
            for column in cutlass.range_constexpr(0, CHUNK, 4):
                words = [bits(x) for x in dq[column : column + 4]]
                store_words(place + (column * TILE_M + 4 * lane), words)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=context.dq_staging, number_of_threads=TILE_M)
            if warp % 4 == 0:
                with cute.arch.elect_one():
                    bulk_add(place, target.iterator + chunk * (CHUNK_BYTES // 4), CHUNK_BYTES)
                cute.arch.cp_async_bulk_commit_group()
