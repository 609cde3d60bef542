"""Acquire and release roles, one warp each: the order in which a deterministic run adds dQ.

The key blocks that a query block meets add in order (`bwd.device.semaphores`), with one semaphore per CTA's columns.
The acquire warp waits for the semaphore of each step and then lets the consumers add. The release warp releases it
after both consumers have added. The release waits for all memory operations to be visible to the GPU, so the consumers
do neither. A single warp for both would wait for the next semaphore before it has released the last one.

Waits:   compute_release_dQ.full, acquire_compute_order.free
Signals: acquire_compute_order.{full,free}
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ....bwd.device.semaphores import release_semaphore, semaphore_ptr, wait_semaphore
from ....core.vec_io import load_vec, store_vec
from ....pipeline.cursor import Cursor, consume, produce
from ..common.work import Sm90BackwardWork, work_tile
from .context import Sm90WideContext

AHEAD = 2  # steps


@cute.jit
def acquire(context: Sm90WideContext):
    cute.arch.griddepcontrol_wait()  # the statistics kernel clears the semaphores
    if const_expr(context.cfg.ascending_order):
        wait_for_distance(context)
    for_each_step(context, acquire_order, produce(context.ends("acquire").acquire_compute_order))


@cute.jit
def wait_for_distance(context: Sm90WideContext):
    """Before the first step: wait until the CTA that this CTA follows is AHEAD steps ahead. The consumers wait for the
    additions of each step; at a distance of one step, a delay of one CTA would delay all CTAs that follow it."""
    work = work_tile(context)
    if work.blocks > 0:
        head, m_block = work.head_kv * context.cfg.group, work.block(cutlass.min(work.first + AHEAD, work.stop) - 1)
        wait_semaphore(own_semaphore(context, work, head, m_block), work.order_index(m_block, head, context))


@cute.jit
def release(context: Sm90WideContext):
    for_each_step(context, release_order, consume(context.ends("release").compute_release_dQ))


@cute.jit
def for_each_step(context: Sm90WideContext, step: cutlass.Constexpr[Callable[..., None]], cursor: Cursor):
    """Call `step` for all steps of a block of keys, in the order of the consumers."""
    cfg, work = context.cfg, work_tile(context)
    for member in cutlass.range(cfg.group, unroll=1):
        of_head, head = work.of_head(context, member), work.head_kv * cfg.group + member
        for i in cutlass.range(of_head.first, of_head.stop, unroll=1):
            step(context, work, head, of_head.block(i), cursor)
            cursor = cursor.next()


@cute.jit
def acquire_order(context: Sm90WideContext, work: Sm90BackwardWork, head: Int32, m_block: Int32, cursor: Cursor):
    """Wait for a step's semaphore, then publish its order index."""
    order_index = work.order_index(m_block, head, context)
    cursor.wait()
    wait_semaphore(own_semaphore(context, work, head, m_block), order_index)
    store_vec(_order_slot(context, cursor.stage), [order_index])
    cursor.arrive()


@cute.jit
def release_order(context: Sm90WideContext, work: Sm90BackwardWork, head: Int32, m_block: Int32, cursor: Cursor):
    """Release a step's semaphore after both consumers have added its dQ."""
    cursor.wait()
    with cute.arch.elect_one():
        release_semaphore(own_semaphore(context, work, head, m_block))
    cursor.at_iteration_of(consume(context.ends("release").acquire_compute_order)).arrive()


def order_index_at(context: Sm90WideContext, stage: Int32) -> Int32:
    """Return the order index of the step in a stage."""
    return load_vec(_order_slot(context, stage), 1)[0]


def own_semaphore(context: Sm90WideContext, work: Sm90BackwardWork, head: Int32, m_block: Int32) -> cute.Pointer:
    """Return the semaphore of this CTA's columns of a query block."""
    block = (work.row_block + m_block) * context.cfg.semaphores + context.args.order.rank
    return semaphore_ptr(work.sums(context)[1], block, head)


def _order_slot(context: Sm90WideContext, stage: Int32) -> cute.Pointer:
    return context.smem.pointer("semaphores", Int32) + stage
