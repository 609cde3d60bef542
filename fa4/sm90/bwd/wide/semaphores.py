"""Take and pass roles, a warp each: the order in which a deterministic run adds dQ.

The key blocks that a query block meets take turns (`bwd.semaphores`), by a counter for each CTA's columns. One warp waits
for the turn of each step and lets the warpgroups add; the other passes a turn on when both have. That takes a wait for
all memory of the GPU, so neither is done by those who multiply. Were one warp to do both, it would wait for a turn
before it has passed the last one on.

Waits:   compute_release_dQ.full, acquire_compute_order.free
Signals: acquire_compute_order.{full,free}
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ....bwd.semaphores import release_semaphore, semaphore_ptr, wait_semaphore
from ....core.vec_io import load_vec, store_vec
from ....pipeline.cursor import Cursor, consume, produce
from ..work import work_tile

AHEAD = 2  # steps


@cute.jit
def acquire(context):
    cute.arch.griddepcontrol_wait()  # the turns are cleared by the statistics kernel
    if cutlass.const_expr(context.cfg.follows):
        wait_for_distance(context)
    at_every_step(context, acquire_order, produce(context.ends("acquire").acquire_compute_order))


@cute.jit
def wait_for_distance(context):
    """Before the first step: until the CTA that this one follows is AHEAD of it. The warpgroups that multiply wait for
    each step's additions, so at a distance of one step a delay of a CTA would delay all that follow it."""
    work = work_tile(context)
    if work.blocks > 0:
        head, m_block = work.head_kv * context.cfg.group, work.block(cutlass.min(work.first + AHEAD, work.stop) - 1)
        wait_semaphore(own_counter(context, work, head, m_block), work.order_index(m_block, head, context))


@cute.jit
def release(context):
    at_every_step(context, release_order, consume(context.ends("release").compute_release_dQ))


@cute.jit
def at_every_step(context, do: cutlass.Constexpr[Callable[..., None]], at: Cursor):
    """All steps of a block of keys, as the warpgroups take them."""
    cfg, work = context.cfg, work_tile(context)
    for member in cutlass.range(cfg.group, unroll=1):
        of_head, head = work.of_head(context, member), work.head_kv * cfg.group + member
        for i in cutlass.range(of_head.first, of_head.stop, unroll=1):
            do(context, work, head, of_head.block(i), at)
            at = at.next()


@cute.jit
def acquire_order(context, work, head: Int32, m_block: Int32, at: Cursor):
    """When a step's turn has come, say so, and which it is."""
    order_index = work.order_index(m_block, head, context)
    at.wait()
    wait_semaphore(own_counter(context, work, head, m_block), order_index)
    store_vec(_place(context, at.stage), [order_index])
    at.arrive()


@cute.jit
def release_order(context, work, head: Int32, m_block: Int32, at: Cursor):
    """When both warpgroups have added a step's dQ."""
    at.wait()
    with cute.arch.elect_one():
        release_semaphore(own_counter(context, work, head, m_block))
    at.in_step(consume(context.ends("release").acquire_compute_order)).arrive()


def order_index_at(context, stage: Int32) -> Int32:
    """The turn of the step that has a stage."""
    return load_vec(_place(context, stage), 1)[0]


def own_counter(context, work, head: Int32, m_block: Int32) -> cute.Pointer:
    """Of this CTA's columns of a query block."""
    block = (work.row_block + m_block) * context.cfg.semaphores + context.args.order.rank
    return semaphore_ptr(work.sums(context)[1], block, head)


def _place(context, stage: Int32) -> cute.Pointer:
    return context.smem.pointer("semaphores", Int32) + stage
