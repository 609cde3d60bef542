"""The steps of a block of keys, as both warpgroups take them: dQ is computed one step late, when everybody's dS of that
step is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ....core.constant import Constant
from ....pipeline.cursor import Cursor, consume
from ...wgmma import Wgmma, wait
from ..work import own_steps
from .share import Share


class Cursors(NamedTuple):
    """Where a warpgroup stands before a step. p: P, handed from one to the other. last_...: of the step before."""

    q: Cursor
    do: Cursor
    p: Cursor
    last_ds: Cursor
    last_head: Int32
    last_block: Int32

    def after_first(self, head: Int32, m_block: Int32) -> Cursors:
        """Those of the second step; the first was at (head, m_block)."""
        return Cursors(self.q.next(), self.do.next(), self.p.next(), self.last_ds, head, m_block)

    def next(self, head: Int32, m_block: Int32) -> Cursors:
        """Those of the step after that at (head, m_block)."""
        return Cursors(self.q.next(), self.do.next(), self.p.next(), self.last_ds.next(), head, m_block)


class Side(Constant):
    """What a warpgroup works with at every step, made once: operands of its products, its share of dQ, and a sum over
    all steps, of `product`. step: what it does until the last product of a step but dQ has been started."""

    compares: bool  # queries with keys, where a mask cuts a block

    def __init__(self, context, role: str, step: Callable[..., None], consumer: int, product: Wgmma):
        self.ends, self.step = context.ends(role), step
        self.share, self.total = Share(context, consumer, self.ends), product.accumulator()

    def let_go(self, at: Cursors) -> None:
        """Of what a step's last product but dQ has read."""
        raise NotImplementedError


@cute.jit
def finish_step(context, side: cutlass.Constexpr[Side], work, at: Cursors, has_dq: cutlass.Constexpr[bool]):
    """The end of a step, with dQ of the one before, if there was one."""
    share = side.share
    if cutlass.const_expr(has_dq):
        dq = share.start(at.last_ds)
        wait(share.products)
        side.let_go(at)
        wait(0)
        share.arrive(at.last_ds)
        share.add(context, work, at, dq)
    else:
        wait(0)
        side.let_go(at)


@cute.jit
def all_steps(context, side: cutlass.Constexpr[Side], work, p: Cursor):
    """All steps of a block of keys; there is one at least."""
    cfg, ends, step = context.cfg, side.ends, side.step
    q, do = consume(ends.load_compute_Q), consume(ends.load_compute_dO)
    head, m_block = work.head_kv * cfg.group, work.block(work.first)
    at = Cursors(q, do, p, consume(ends.dK_compute_dS), head, m_block)
    step(context, side, work, (head, m_block), at, side.compares, False)
    at = at.after_first(head, m_block)
    for member in cutlass.range(cfg.group, unroll=1):
        head, of_head = work.head_kv * cfg.group + member, work.of_head(context, member)
        first = work.first + cutlass.select_(member == 0, Int32(1), Int32(0))
        if cutlass.const_expr(side.compares):
            own = own_steps(of_head, Int32(0), cfg)
            for half in cutlass.range(2 if cfg.has_left or cfg.folds else 1, unroll=1):  # cut blocks may come last, too
                begin_cut, end_cut = own.cut(half, first)
                for i in cutlass.range(begin_cut, end_cut, unroll=1):
                    m_block = of_head.block(i)
                    step(context, side, work, (head, m_block), at, True, True)
                    at = at.next(head, m_block)
                begin_full, end_full = own.full(half, first, work.first)
                for i in cutlass.range(begin_full, end_full, unroll=1):
                    m_block = of_head.block(i)
                    step(context, side, work, (head, m_block), at, False, True)
                    at = at.next(head, m_block)
        else:
            for i in cutlass.range(first, work.stop, unroll=1):
                m_block = of_head.block(i)
                step(context, side, work, (head, m_block), at, False, True)
                at = at.next(head, m_block)
    dq = side.share.start(at.last_ds)
    wait(0)
    side.share.add(context, work, at, dq)
