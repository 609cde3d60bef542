"""MMA role, one warp, one elected thread of the leader: issues every product of both CTAs.

Per step: dP, S of the next step, then the products with P and dS in the order of `Sm100SparseConfig.products`. Each
product has 128 columns of a right operand, 64 in each CTA, and reduces 64 columns or rows for each stage of the ring.

Waits:   load_mma_{Q,dO,right}.full, compute_mma_weights.full, mma_compute_S.free, mma_reduce_{even,odd}.free
Signals: mma_compute_{S,dP,dQ}.full, mma_reduce_{even,odd}.full, load_mma_right.free
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ...bwd.device.list_work import work_tile
from ...core.constant import Constant
from ...pipeline.cursor import Cursor, consume, produce
from ...pipeline.ends import LEADER, Ends
from .. import tmem
from ..mma import Major, SmemOperand, Umma
from ..stages import PAIR
from .config import COLUMNS, D_COLUMNS, UNIT, Gradient, Product
from .context import Sm100SparseContext
from .load import rank_of

_WORDS = UNIT.nbytes >> 4  # of a descriptor, from a stage to the next one


@cute.jit
def mma(context: Sm100SparseContext):
    work = work_tile(context)
    if (work.count > 0) & (rank_of() == LEADER):
        issue(context, context.ends("mma"), work.blocks(context))


@cute.jit
def issue(context: Sm100SparseContext, ends: cutlass.Constexpr[Ends], steps: Int32):
    cfg, spans = context.cfg, context.tmem
    base, low = tmem.base(context.smem), Descriptors.of(context)
    scores, operands = produce(ends.mma_compute_S), consume(ends.load_mma_right)
    weights, drained = consume(ends.compute_mma_weights), [produce(ends.mma_reduce_even), produce(ends.mma_reduce_odd)]
    consume(ends.load_mma_Q).wait()
    operands = low.issue_by_panels(base + spans.S, low.q, cfg.q_tile.panels, operands, scores.commit)
    scores = scores.next()
    if const_expr(cfg.keeps_do):
        consume(ends.load_mma_dO).wait()
    for i in cutlass.range(steps, unroll=1):
        drained[1].wait()  # lies over dP
        done = produce(ends.mma_compute_dP).commit
        operands = low.issue_by_panels(base + spans.dP, low.do, cfg.do_tile.panels, operands, done)
        if i + 1 < steps:
            scores.wait()
            operands = low.issue_by_panels(base + spans.S, low.q, cfg.q_tile.panels, operands, scores.commit)
        scores = scores.next()
        weights.wait()
        weights = weights.next()
        for product in cfg.products:
            if const_expr(product.drains is None):
                d = base + (spans.dQ + product.part * D_COLUMNS)
                operands = low.issue_product(d, product, operands, i > 0, None)
            else:
                parity = product.drains % 2
                drained[parity].wait()
                d = base + (spans.odd if const_expr(parity) else spans.even)
                operands = low.issue_product(d, product, operands, Boolean(False), drained[parity].commit)
                drained[parity] = drained[parity].next()
    with cute.arch.elect_one():
        produce(ends.mma_compute_dQ).commit()


@dataclass(frozen=True)
class Descriptors(Constant):
    """Low descriptor words: of the left operands, and of the ring's first stage as columns are reduced (`panels`) or
    rows (`rows`). They are computed once: an address in a loop would take the issuing thread longer than a product
    takes the matrix unit."""

    dtype: type[cutlass.Numeric]
    q: Int32
    do: Int32 | None  # None: comes through the ring
    p: Int32
    ds: Int32
    ds_keys: Int32
    panels: Int32
    rows: Int32

    @staticmethod
    def of(context: Sm100SparseContext) -> Descriptors:
        def word(region: str, major: Major) -> Int32:
            low = SmemOperand(UNIT, major).at(context.smem.address(region))
            return cute.arch.make_warp_uniform(low)

        do = word("dO", Major.K) if context.cfg.keeps_do else None
        p, ds, ds_keys = word("P", Major.MN), word("dS", Major.MN), word("dS_keys", Major.K)
        ring = word("right", Major.K), word("right", Major.MN)
        return Descriptors(context.cfg.dtype, word("Q", Major.K), do, p, ds, ds_keys, *ring)

    def issue_by_panels(
        self, d: Int32, left: Int32 | None, panels: int, operands: Cursor, done: Callable[[], None]
    ) -> Cursor:
        """Issue S or dP: reduce the columns of a left operand. Returns the cursor after the right operand."""
        return self._issue(d, left, panels, Major.K, Major.K, operands, Boolean(False), done)

    def issue_product(
        self, d: Int32, product: Product, operands: Cursor, accumulate: Boolean, done: Callable[[], None] | None
    ) -> Cursor:
        """Issue columns of a gradient. Returns the cursor after the right operand."""
        left = {Gradient.DV: self.p, Gradient.DK: self.ds, Gradient.DQ: self.ds_keys}[product.gradient]
        major = Major.K if product.gradient is Gradient.DQ else Major.MN
        return self._issue(d, left, PAIR, major, Major.MN, operands, accumulate, done)

    def _issue(
        self, d: Int32, left: Int32 | None, units: int, left_major: Major, right_major: Major, operands: Cursor,
        accumulate: Boolean, done: Callable[[], None] | None,
    ) -> Cursor:  # fmt: skip
        """Issue a product with some stages of its right operand. done: commits, called by one thread."""
        a, b = SmemOperand(UNIT, left_major), SmemOperand(UNIT, right_major)
        umma = Umma(self.dtype, n=COLUMNS, k=UNIT.columns, b=b, a=a, m=PAIR * UNIT.rows, ctas=PAIR)
        ring = self.panels if right_major is Major.K else self.rows
        for i in range(units):
            operands.wait()
            first, low = operands, left
            if low is None:  # before the right operand
                operands = operands.next()
                operands.wait()
                low = ring + first.stage * _WORDS
            else:
                low = low + i * _WORDS
            with cute.arch.elect_one():
                umma.issue(d, low, ring + operands.stage * _WORDS, accumulate if i == 0 else True)
                if left is None:
                    first.commit()
                operands.commit()
                if i + 1 == units and done is not None:
                    done()
            operands = operands.next()
        return operands
