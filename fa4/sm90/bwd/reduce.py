"""Reduce role: adds the dQ of each step to its float32 sum in global memory, with one bulk addition per consumer's
share. The sum keeps the layout in which the threads hold dQ.

Deterministic: the key blocks that a query block meets add in order (`bwd.device.semaphores`). To wait for the
semaphore, add and release it takes longer than a step, so several warps take the steps round-robin. A CTA waits only
for CTAs with lower launch indices, which run or have ended.

The first CTA in the order stores what the others add to. Without an order this is the first writer
(`Sm90BackwardConfig.first_writer`). The last in the order may store dq itself, see `last_dq`.

Waits:   compute_reduce_dQ.full
Signals: compute_reduce_dQ.free, reduce_compute_sum.full
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...bwd.device.semaphores import (
    claim_first_writer,
    first_writer_state,
    release_semaphore,
    semaphore_ptr,
    wait_bulk_semaphore,
    wait_for_bulk_additions,
)
from ...pipeline.cursor import Cursor, consume
from ...pipeline.tma import bulk_add, bulk_store, wait_read
from .common.work import Sm90BackwardWork, work_tile
from .context import Sm90BackwardContext
from .last_dq import start_load_of_sum, start_store


@cute.jit
def reduce(context: Sm90BackwardContext):
    cfg = context.cfg
    reducer = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - context.first_reduce_warp
    if const_expr(cfg.deterministic):
        add_in_order(context, reducer)
    elif reducer < cfg.dq_consumers:
        add_share(context, reducer)


@cute.jit
def add_share(context: Sm90BackwardContext, consumer: Int32):
    """Add a consumer's share of every step; one warp per consumer."""
    cfg, work = context.cfg, work_tile(context)
    dq = consume(context.ends("reduce").compute_reduce_dQ, consumer)
    cute.arch.griddepcontrol_wait()  # the statistics kernel clears the sums or their semaphores
    if const_expr(cfg.lists_by_head):
        for member in cutlass.range(cfg.group, unroll=1):
            of_head = work.of_head(context, member)
            for i in cutlass.range(of_head.first, of_head.stop, unroll=1):
                add_step(context, consumer, work, dq, work.head_kv * cfg.group + member, of_head.block(i))
                dq = dq.next()
    else:
        for i in cutlass.range(work.blocks * cfg.group, unroll=1):
            head = work.head_kv * cfg.group + i // work.blocks
            add_step(context, consumer, work, dq, head, work.block(work.first + i % work.blocks))
            dq = dq.next()


@cute.jit
def add_step(
    context: Sm90BackwardContext, consumer: Int32, work: Sm90BackwardWork, dq: Cursor, head: Int32, m_block: Int32
):
    """Add a consumer's share of one step."""
    cfg = context.cfg
    block, is_first = work.row_block + m_block, Boolean(False)
    semaphore, state = None, None
    if const_expr(cfg.first_writer):
        semaphore = semaphore_ptr(work.sums(context)[1], block * cfg.semaphores + consumer, head)
        state = first_writer_state(semaphore)
    dq.wait()
    cute.arch.fence_proxy("async.shared", space="cta")  # here no product waits for it
    if const_expr(cfg.first_writer):
        is_first = claim_first_writer(semaphore, state)
    if is_first:
        start(bulk_store, context, work, block, head, consumer)
    else:
        start(bulk_add, context, work, block, head, consumer)
    wait_read()
    dq.arrive()
    if const_expr(cfg.first_writer):  # noqa: SIM102  the outer condition is compile-time
        if is_first:
            with cute.arch.elect_one():
                wait_for_bulk_additions()
                release_semaphore(semaphore)


@cute.jit
def add_in_order(context: Sm90BackwardContext, reducer: Int32):
    """Add both shares of every `reducers`-th step, in the order of the semaphores."""
    cfg, work = context.cfg, work_tile(context)
    cute.arch.griddepcontrol_wait()  # the statistics kernel clears the semaphores
    if const_expr(cfg.lists_by_head):
        before = Int32(0)
        for member in cutlass.range(cfg.group, unroll=1):
            of_head = work.of_head(context, member)
            first = (reducer + cfg.reducers - before % cfg.reducers) % cfg.reducers
            for i in cutlass.range(first, of_head.blocks, cfg.reducers, unroll=1):
                head = work.head_kv * cfg.group + member
                add_step_in_order(context, reducer, work, before + i, head, of_head.block(i))
            before = before + of_head.blocks
    else:
        for i in cutlass.range(reducer, work.blocks * cfg.group, cfg.reducers, unroll=1):
            head = work.head_kv * cfg.group + i // work.blocks
            of_head = work.of_head(context, i // work.blocks)
            m_block = of_head.block(work.first + i % work.blocks)
            add_step_in_order(context, reducer, work, i, head, m_block)


@cute.jit
def add_step_in_order(
    context: Sm90BackwardContext, reducer: Int32, work: Sm90BackwardWork, i: Int32, head: Int32, m_block: Int32
):
    """Add step i of the CTA, or store its dq if that is complete."""
    semaphore = semaphore_ptr(work.sums(context)[1], work.row_block + m_block, head)
    order_index = work.order_index(m_block, head, context)
    wait_bulk_semaphore(semaphore, order_index)
    if const_expr(context.cfg.last_finishes):
        start_load_of_sum(context, reducer, work, i, head, m_block)
        if m_block >= work.finished.first:
            store_step(context, reducer, work, i, head, m_block)
        else:
            add_and_release(context, reducer, work, i, head, m_block, order_index, semaphore)
    else:
        add_and_release(context, reducer, work, i, head, m_block, order_index, semaphore)


@cute.jit
def store_step(
    context: Sm90BackwardContext, reducer: Int32, work: Sm90BackwardWork, i: Int32, head: Int32, m_block: Int32
):
    """Store dq of step i, to which no later key block adds."""
    cfg, dq = context.cfg, context.ends("reduce").compute_reduce_dQ
    for consumer in cutlass.range_constexpr(cfg.dq_consumers):
        dq.wait_full(reducer * cfg.dq_consumers + consumer, i // cfg.reducers & 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        start_store(context, work, head, m_block, consumer)
    free_buffers(context, reducer)


@cute.jit
def free_buffers(context: Sm90BackwardContext, reducer: Int32):
    """Free the buffer of each consumer when the copy from it, a bulk group, has read it."""
    cfg, dq = context.cfg, context.ends("reduce").compute_reduce_dQ
    for consumer in cutlass.range_constexpr(cfg.dq_consumers):
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(cfg.dq_consumers - 1 - consumer, read=True)
        dq.arrive_read(reducer * cfg.dq_consumers + consumer)


@cute.jit
def add_and_release(
    context: Sm90BackwardContext,
    reducer: Int32,
    work: Sm90BackwardWork,
    i: Int32,
    head: Int32,
    m_block: Int32,
    order_index: Int32,
    semaphore: cute.Pointer,
):
    """Add dQ of step i to its sum, and release the semaphore."""
    cfg, dq = context.cfg, context.ends("reduce").compute_reduce_dQ
    for consumer in cutlass.range_constexpr(cfg.dq_consumers):
        dq.wait_full(reducer * cfg.dq_consumers + consumer, i // cfg.reducers & 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        if order_index == 0:
            start(bulk_store, context, work, work.row_block + m_block, head, consumer)
        else:
            start(bulk_add, context, work, work.row_block + m_block, head, consumer)
    free_buffers(context, reducer)
    with cute.arch.elect_one():
        wait_for_bulk_additions()
        release_semaphore(semaphore)


def start(
    copy: Callable[..., None],
    context: Sm90BackwardContext,
    work: Sm90BackwardWork,
    block: Int32,
    head: Int32,
    consumer: Int32,
) -> None:
    """Start a bulk addition or store of a consumer's share of dQ to a block's sum, as one bulk group."""
    share = context.cfg.dq_bytes // 4
    target = work.sums(context)[0][None, block, head].iterator
    with cute.arch.elect_one():
        copy(context.smem.pointer("dQ", Float32) + consumer * share, target + consumer * share, context.cfg.dq_bytes)
        cute.arch.cp_async_bulk_commit_group()
