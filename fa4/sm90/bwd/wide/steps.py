"""Loop over the steps of a block of keys, and the store of its gradients, for both consumers. dQ is computed one step
late, after both consumers, and in a pair both CTAs, have stored dS of that step."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ....core.constant import Constant
from ....pipeline.cursor import Cursor, consume
from ....pipeline.roles import WARPS_PER_WARPGROUP
from ....pipeline.tma import wait_read
from ...wgmma import Wgmma
from ...wgmma_order import wait
from ..common.config import CONSUMERS, WARPGROUP
from ..common.epilogue import store, to_smem
from ..common.work import Sm90BackwardWork, StepCoord, warpgroup_steps
from .context import Sm90WideContext
from .share import DqShare


class Cursors(NamedTuple):
    """A consumer's cursors before a step. p: of P, from one consumer to the other. last_...: of the step before."""

    q: Cursor
    do: Cursor
    p: Cursor
    last_ds: Cursor
    last_head: Int32
    last_block: Int32

    def after_first(self, head: Int32, m_block: Int32) -> Cursors:
        """Return the cursors of the second step; the first step was at (head, m_block)."""
        return Cursors(self.q.next(), self.do.next(), self.p.next(), self.last_ds, head, m_block)

    def next(self, head: Int32, m_block: Int32) -> Cursors:
        """Return the cursors of the step after the step at (head, m_block)."""
        return Cursors(self.q.next(), self.do.next(), self.p.next(), self.last_ds.next(), head, m_block)


class WideConsumer(Constant):
    """State of a consumer, created once: operands, its share of dQ, and the accumulator of `product` over all
    steps."""

    applies_mask: bool  # in partially masked blocks

    def __init__(self, context: Sm90WideContext, role: str, index: int, product: Wgmma):
        self.context, self.ends, self.index = context, context.ends(role), index
        self.share, self.total = DqShare(context, index, self.ends), product.accumulator()

    def release(self, cursors: Cursors) -> None:
        """Release the stages that a step's last product before dQ has read."""
        raise NotImplementedError

    def step(self, work: Sm90BackwardWork, coord: StepCoord, cursors: Cursors, is_partial: bool, has_dq: bool) -> None:
        """Run one step on a block of queries. coord: (query head, query block). is_partial: apply the mask. has_dq: see
        `finish_step`."""
        raise NotImplementedError

    def finish_step(self, work: Sm90BackwardWork, cursors: Cursors, has_dq: bool) -> None:
        """End a step; with has_dq, compute and add dQ of the step before."""
        if has_dq:
            dq = self.share.start(cursors.last_ds)
            wait(self.share.products)
            self.release(cursors)
            wait(0)
            self.share.arrive(cursors.last_ds)
            self.share.add(self.context, work, cursors, dq)
        else:
            wait(0)
            self.release(cursors)


@cute.jit
def all_steps(context: Sm90WideContext, consumer: cutlass.Constexpr[WideConsumer], work: Sm90BackwardWork, p: Cursor):
    """Run all steps of a block of keys (at least one)."""
    cfg, ends = context.cfg, consumer.ends
    q, do = consume(ends.load_compute_Q), consume(ends.load_compute_dO)
    head, m_block = work.head_kv * cfg.group, work.block(work.first)
    cursors = Cursors(q, do, p, consume(ends.dK_compute_dS), head, m_block)
    consumer.step(work, (head, m_block), cursors, consumer.applies_mask, False)
    cursors = cursors.after_first(head, m_block)
    for member in cutlass.range(cfg.group, unroll=1):
        head, of_head = work.head_kv * cfg.group + member, work.of_head(context, member)
        first = work.first + cutlass.select_(member == 0, Int32(1), Int32(0))
        if const_expr(consumer.applies_mask):
            wg_steps = warpgroup_steps(of_head)
            for half in cutlass.range(
                2 if const_expr(cfg.has_left or cfg.folds) else 1, unroll=1
            ):  # partial blocks may be last
                begin_partial, end_partial = wg_steps.partial(half, first)
                for i in cutlass.range(begin_partial, end_partial, unroll=1):
                    m_block = of_head.block(i)
                    consumer.step(work, (head, m_block), cursors, True, True)
                    cursors = cursors.next(head, m_block)
                begin_full, end_full = wg_steps.full(half, first, work.first)
                for i in cutlass.range(begin_full, end_full, unroll=1):
                    m_block = of_head.block(i)
                    consumer.step(work, (head, m_block), cursors, False, True)
                    cursors = cursors.next(head, m_block)
        else:
            for i in cutlass.range(first, work.stop, unroll=1):
                m_block = of_head.block(i)
                consumer.step(work, (head, m_block), cursors, False, True)
                cursors = cursors.next(head, m_block)
    dq = consumer.share.start(cursors.last_ds)
    wait(0)
    consumer.share.add(context, work, cursors, dq)


@cute.jit
def store_gradient(
    context: Sm90WideContext,
    consumer: cutlass.Constexpr[WideConsumer],
    work: Sm90BackwardWork,
    name: cutlass.Constexpr[str],
    scale: Float32,
):
    """Store dV or dK, times `scale`, through the shared memory of V or K."""
    # The last products of the other consumer may still read that memory.
    cute.arch.barrier(barrier_id=context.last_dq, number_of_threads=CONSUMERS * WARPGROUP)
    cfg, region = context.cfg, name[1].upper()
    to_smem(cfg, context.smem.address(region), getattr(cfg, f"{name}_tile"), consumer.total, scale)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=context.gradients_staged + consumer.index, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
        store(context, work, name, work.n_block, context.smem.pointer(region, cfg.dtype))
        wait_read()
