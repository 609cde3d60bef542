"""Take and pass roles, a warp each: the order in which a deterministic run adds dQ.

The key blocks that a query block meets take turns (`bwd.turns`), by a counter for each CTA's columns. One warp waits
for the turn of each step and lets the warpgroups add; the other passes a turn on when both have. That takes a wait for
all memory of the GPU, so neither is done by those who multiply. Were one warp to do both, it would wait for a turn
before it has passed the last one on.

Waits:   compute_pass_dQ.full, take_compute_turn.free
Signals: take_compute_turn.{full,free}
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ....bwd.turns import counter, pass_turn_on, wait_for_turn
from ....core.words import load_words, store_words
from ....pipeline.cursor import Cursor, consume, produce
from ..work import work_tile

AHEAD = 2  # steps


@cute.jit
def take(context):
    cute.arch.griddepcontrol_wait()  # the turns are cleared by the statistics kernel
    if cutlass.const_expr(context.cfg.follows):
        wait_for_distance(context)
    at_every_step(context, take_turn, produce(context.ends("take").take_compute_turn))


@cute.jit
def wait_for_distance(context):
    """Before the first step: until the CTA that this one follows is AHEAD of it. The warpgroups that multiply wait for
    each step's additions, so at a distance of one step a delay of a CTA would delay all that follow it."""
    work = work_tile(context)
    if work.blocks > 0:
        head, m_block = work.head_kv * context.cfg.group, work.block(cutlass.min(work.first + AHEAD, work.stop) - 1)
        wait_for_turn(own_counter(context, work, head, m_block), work.turn(m_block, head, context))


@cute.jit
def pass_on(context):
    at_every_step(context, pass_turn, consume(context.ends("pass").compute_pass_dQ))


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
def take_turn(context, work, head: Int32, m_block: Int32, at: Cursor):
    """When a step's turn has come, say so, and which it is."""
    turn = work.turn(m_block, head, context)
    at.wait()
    wait_for_turn(own_counter(context, work, head, m_block), turn)
    store_words(_place(context, at.stage), [turn])
    at.arrive()


@cute.jit
def pass_turn(context, work, head: Int32, m_block: Int32, at: Cursor):
    """When both warpgroups have added a step's dQ."""
    at.wait()
    with cute.arch.elect_one():
        pass_turn_on(own_counter(context, work, head, m_block))
    at.in_step(consume(context.ends("pass").take_compute_turn)).arrive()


def turn_at(context, stage: Int32) -> Int32:
    """The turn of the step that has a stage."""
    return load_words(_place(context, stage), 1)[0]


def own_counter(context, work, head: Int32, m_block: Int32) -> cute.Pointer:
    """Of this CTA's columns of a query block."""
    block = (work.row_block + m_block) * context.cfg.turns + context.args.order.rank
    return counter(work.sums(context)[1], block, head)


def _place(context, stage: Int32) -> cute.Pointer:
    return context.smem.pointer("turns", Int32) + stage
