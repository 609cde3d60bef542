"""Reduce role, four warps: adds dQ of each step to its float32 accumulator in global memory.

A thread has one query (with `dq_transposed` one column of Q). Each CTA of a pair has half of the queries; a query has
two threads, and lane l + 64 holds the second half of the columns of lane l. Chunks of TMEM columns go through two
stages of shared memory, in the layout of the accumulator, so that one bulk addition of contiguous bytes adds a chunk.

Deterministic: the key blocks of a query block (in a pair, of each half of it) add in the order of a semaphore, see
`bwd.device.semaphores`. CTAs earlier in the order are launched earlier and never wait for later ones, so every wait
ends. This role waits when the first chunk of a step is staged. It releases the semaphore one step later, at the same
point, when the additions are complete. Waiting for them at once would delay the next dQ, and the products that need its
columns. The next dQ itself does not depend on the semaphore. Usually the semaphore of this step has reached its order
index already. Then its first addition starts before the release, so that additions follow each other without a pause.
If it has not, the release comes first: a CTA releases before it waits, so every wait ends.

Waits:   mma_reduce_dQ.full
Signals: mma_reduce_dQ.free
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...bwd.device.semaphores import (
    has_reached,
    release_semaphore,
    wait_bulk_semaphore,
    wait_for_bulk_additions,
)
from ...core.vec_io import bits, store_vec
from ...pipeline.cursor import ALL, Cursor, consume
from ...pipeline.tma import bulk_add
from .. import tmem
from .config import CHUNK, CHUNK_BYTES, DQ_STAGES, LANES
from .context import Sm100BackwardContext
from .work import Sm100BackwardWork, work_tile


@cute.jit
def reduce(context: Sm100BackwardContext):
    cfg, args = context.cfg, context.args
    ends = context.ends("reduce")
    is_issuer = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == context.first_reduce_warp
    work = work_tile(context)
    dq, stage = consume(ends.mma_reduce_dQ, ALL), Int32(0)
    pending = Int32(NO_RELEASE)
    for member in cutlass.range(cfg.group, unroll=1):
        head = work.head_kv * cfg.group + member
        of_head = work.of_head(context, member)
        for i in cutlass.range(of_head.first, of_head.stop, unroll=1):
            m_block = of_head.block(i)
            dq.wait(0)
            block = work.row_block + m_block
            ordered = OrderedAdd.at(context, work, m_block, head, pending)
            target = args.dq_sum[None, block, head].iterator + work.rank * (cfg.tile_m * cfg.columns // cfg.ctas)
            stage = add_to_accumulator(context, dq, target, is_issuer, stage, ordered)
            if const_expr(cfg.deterministic):
                pending = ordered.semaphore
            dq = dq.next()
    if const_expr(cfg.deterministic):  # noqa: SIM102  one is decided at compile time
        if is_issuer:
            release_pending(context, pending)
    if is_issuer:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


NO_RELEASE = -1  # no semaphore to release


class OrderedAdd(NamedTuple):
    """Order of an addition: index of the query block's semaphore (in a pair, of a half of the block), the order index
    that it must reach before this CTA adds, and the semaphore of the previous step, which is not released yet."""

    semaphore: Int32
    order_index: Int32
    pending: Int32

    @staticmethod
    def at(
        context: Sm100BackwardContext, work: Sm100BackwardWork, m_block: Int32, head: Int32, pending: Int32
    ) -> OrderedAdd | None:
        """Return the order of this step's addition; None if not deterministic."""
        cfg = context.cfg
        if not cfg.deterministic:
            return None
        block = (work.row_block + m_block) * cfg.ctas + work.rank
        semaphore = Int32(cute.crd2idx((block, head), context.args.semaphores.layout))
        return OrderedAdd(semaphore, work.order_index(m_block, head, context), pending)


@cute.jit
def release_pending(context: Sm100BackwardContext, pending: Int32, newer: cutlass.Constexpr[int] = 0):
    """Issuing warp: release the semaphore of the previous step, if there was one. newer: bulk groups of this step."""
    if pending != NO_RELEASE:
        wait_for_bulk_additions(newer)
        with cute.arch.elect_one():
            release_semaphore(context.args.semaphores.iterator + pending)


@cute.jit
def acquire_order(context: Sm100BackwardContext, ordered: OrderedAdd) -> Int32:
    """Issuing warp, before the first addition of a step: wait for the order index. Return the semaphore to release
    after it."""
    semaphore, pending = context.args.semaphores.iterator + ordered.semaphore, ordered.pending
    if not has_reached(semaphore, ordered.order_index):
        release_pending(context, pending)
        pending = Int32(NO_RELEASE)
        wait_bulk_semaphore(semaphore, ordered.order_index)
    return pending


@cute.jit
def add_to_accumulator(
    context: Sm100BackwardContext,
    dq: Cursor,
    target: cute.Pointer,
    is_issuer: Boolean,
    stage: Int32,
    ordered: OrderedAdd | None,
):
    """Add dQ of one step, DQ_STAGES chunks at a time; return the stage after the last one used.

    Args:
        dq: cursor of dQ in tensor memory; its first part is full.
        target: accumulator of the block (in a pair, this CTA's half), chunk after chunk.
        is_issuer: True in the warp that issues the additions and waits for them.
        stage: next stage of shared memory.
        ordered: `OrderedAdd` to wait for before the first addition, or None.
    """
    cfg = context.cfg
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    address = tmem.lane_address(context.tmem.dQ, warp)
    lane = cute.arch.thread_idx()[0] % LANES
    chunks, last = cfg.dq_columns // CHUNK, cfg.dq_parts - 1
    if const_expr(cfg.dq_transposed):
        # The next dP waits for the columns of these 64 rows. They are in the first 16 lanes of each warp.
        high = tmem.load(tmem.lane_address(context.tmem.dQ_high, warp), cfg.tile_m)
        tmem.wait_loads()
        dq.arrive(0)
        row = lane // 32 * 16 + lane % 32
        chunk_target = target + chunks * (CHUNK_BYTES // 4)
        add_chunks(context, [high], row, cfg.columns - LANES, chunk_target, is_issuer, stage, ordered, lane % 32 < 16)
        stage = (stage + 1) % DQ_STAGES
        dq.wait(last)
    for first in cutlass.range_constexpr(0, chunks, DQ_STAGES):
        batch = range(first, min(first + DQ_STAGES, chunks))
        loaded = [tmem.load(address + chunk * CHUNK, CHUNK) for chunk in batch]
        tmem.wait_loads()
        if const_expr(batch[-1] == chunks - 1):
            dq.arrive(last)
        count = min(cfg.chunks_together, len(batch))
        for i in cutlass.range_constexpr(0, len(batch), count):
            chunk_target = target + batch[i] * (CHUNK_BYTES // 4)
            is_first = const_expr(batch[i] == 0 and not cfg.dq_transposed)
            order = ordered if is_first else None
            add_chunks(context, loaded[i : i + count], lane, LANES, chunk_target, is_issuer, stage, order)
            stage = (stage + count) % DQ_STAGES
    return stage


def stage_ptr(context: Sm100BackwardContext, stage: Int32) -> cute.Pointer:
    return context.smem.pointer("dQ", Float32) + stage * (CHUNK_BYTES // 4)


def store_chunk(dq: list, smem_ptr: cute.Pointer, row: Int32, rows: int) -> None:
    """Store this thread's row of a chunk of shape (columns / 4, rows, 4), float32."""
    for column in range(0, len(dq), 4):
        store_vec(smem_ptr + (column * rows + 4 * row), [bits(x) for x in dq[column : column + 4]])


@cute.jit
def issue_addition(smem_ptr: cute.Pointer, target: cute.Pointer):
    """Start the bulk addition of a chunk, in its own bulk group."""
    with cute.arch.elect_one():
        bulk_add(smem_ptr, target, CHUNK_BYTES)
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def add_chunks(
    context: Sm100BackwardContext,
    chunks: list,
    row: Int32,
    rows: cutlass.Constexpr[int],
    target: cute.Pointer,
    is_issuer: Boolean,
    stage: Int32,
    ordered: OrderedAdd | None,
    is_active: Boolean = True,
):
    """Stage neighbouring chunks (this thread stores row `row`) and start their additions. ordered: of the first chunk
    of a step."""
    if is_issuer:
        # The last additions from these stages have read them.
        cute.arch.cp_async_bulk_wait_group(DQ_STAGES - len(chunks), read=True)
    cute.arch.barrier(barrier_id=context.dq_staging, number_of_threads=LANES)
    if is_active:
        for i in cutlass.range_constexpr(len(chunks)):
            store_chunk(chunks[i], stage_ptr(context, (stage + i) % DQ_STAGES), row, rows)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=context.dq_staging, number_of_threads=LANES)
    if is_issuer:
        pending = Int32(NO_RELEASE)
        if const_expr(ordered is not None):
            pending = acquire_order(context, ordered)
        for i in cutlass.range_constexpr(len(chunks)):
            issue_addition(stage_ptr(context, (stage + i) % DQ_STAGES), target + i * (CHUNK_BYTES // 4))
        if const_expr(ordered is not None):
            release_pending(context, pending, len(chunks))
