"""Second MMA role, one warp, one elected thread: issues columns of dV and dK, beside the products of `mma`.

Its products wait for those who add the last ones to sums. They use the places of S and dP in tensor memory while these
are not needed, see `Sm100TransposedConfig.panels`.

Waits:   load_mma_{Q,dO}.full, compute_mma_weights.full, mma_compute_{S,dP}.free, mma_reduce_over_{S,dP}.free
Signals: mma_reduce_over_{S,dP}.full, mma_mma_over_{S,dP}.full, compute_mma_weights.free
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ....bwd.device.list_work import work_tile
from ....core.constant import Constant
from ....pipeline.cursor import ALL, Cursor, consume, produce
from ....pipeline.ends import Ends
from ... import tmem
from ...mma import Major, SmemOperand, Umma, first_word
from .config import HEADS, HEADS_PANEL, INSTANCES, SUM_COLUMNS, Place
from .context import Sm100TransposedContext
from .mma import WORDS


@cute.jit
def mma_dkv(context: Sm100TransposedContext):
    work = work_tile(context)
    if work.count > 0:
        issue(context, context.ends("mma_dkv"), work.blocks(context))


@cute.jit
def issue(context: Sm100TransposedContext, ends: cutlass.Constexpr[Ends], steps: Int32):
    operands, weights = Operands.of(context), consume(ends.compute_mma_weights)
    over_s, over_dp = produce(ends.mma_reduce_over_S, ALL), produce(ends.mma_reduce_over_dP, ALL)
    s, dp = produce(ends.mma_compute_S), produce(ends.mma_compute_dP)
    s_place, dp_place = produce(ends.mma_mma_over_S), produce(ends.mma_mma_over_dP)
    s_place.arrive()
    s_place, s, dp = s_place.next(), s.next().next(), dp.next().next()  # these: of the next step's scores
    consume(ends.load_mma_Q).wait()
    consume(ends.load_mma_dO).wait()
    beside_s, beside_dp = context.cfg.beside
    beside_both = context.cfg.sums - beside_s - beside_dp
    for i in cutlass.range(steps, unroll=1):
        weights.wait()
        over_dp = issue_panels(operands, Int32(0), beside_s, Place.DP, over_dp)
        wait_all(over_dp)
        dp_place.arrive()
        if i + 1 < steps:
            s.wait()
        over_s = issue_panels(operands, Int32(beside_s), beside_dp, Place.S, over_s)
        if i + 1 < steps:
            dp.wait()
        first = Int32(beside_s + beside_dp)
        over_dp = issue_panels(operands, first, beside_both % 2, Place.DP, over_dp)
        for pair in cutlass.range(beside_both // 2, unroll=1):
            panel = first + (beside_both % 2 + 2 * pair)
            over_s = issue_panels(operands, panel, 1, Place.S, over_s)
            over_dp = issue_panels(operands, panel + 1, 1, Place.DP, over_dp)
        with cute.arch.elect_one():
            weights.commit()
        wait_all(over_s)
        s_place.arrive()
        weights, s, dp, s_place, dp_place = weights.next(), s.next(), dp.next(), s_place.next(), dp_place.next()


def wait_all(cursor: Cursor) -> None:
    """Wait until all columns in a place have been read."""
    for instance in range(INSTANCES):
        cursor.wait(instance)


@dataclass(frozen=True)
class Operands(Constant):
    """Operands of the products. over_s, over_dp, p, ds: tensor-memory addresses. q, do: low descriptor words, as rows
    are reduced."""

    dtype: type[cutlass.Numeric]
    dv_panels: int
    over_s: Int32
    over_dp: Int32
    p: Int32
    ds: Int32
    q: Int32
    do: Int32

    @staticmethod
    def of(context: Sm100TransposedContext) -> Operands:
        base, spans = tmem.base(context.smem), context.tmem
        addresses = [base + column for column in (spans.over_S, spans.over_dP, spans.P, spans.dS)]
        rows = [first_word(context.smem, region, HEADS_PANEL, Major.MN) for region in ("Q", "dO")]
        return Operands(context.cfg.dtype, context.cfg.do_tile.panels, *addresses, *rows)


@cute.jit
def issue_panels(
    operands: cutlass.Constexpr[Operands],
    first: Int32,
    count: cutlass.Constexpr[int],
    place: cutlass.Constexpr[Place],
    drained: Cursor,
) -> Cursor:
    """Issue so many panels of dV and dK from the first one on, one after the other in a place. A loop: as straight-line
    code it would have more descriptor words than registers. Returns the cursor after them."""
    product = Umma(operands.dtype, n=SUM_COLUMNS, k=HEADS, b=SmemOperand(HEADS_PANEL, Major.MN))
    d = operands.over_s if const_expr(place is Place.S) else operands.over_dp
    for panel in cutlass.range(first, first + count, unroll=1):
        is_dv, of_dk = Boolean(panel < operands.dv_panels), panel - operands.dv_panels
        left = Int32(cutlass.select_(is_dv, operands.p, operands.ds))
        right = cutlass.select_(is_dv, operands.do + panel * WORDS, operands.q + of_dk * WORDS)
        for instance in cutlass.range_constexpr(INSTANCES):
            drained.wait(instance)
            column = instance * SUM_COLUMNS
            with cute.arch.elect_one():
                words = Int32(right) + (column * HEADS_PANEL.bits // 8 >> 4)
                product.issue(d + column, left, words, Boolean(False))
                drained.commit(instance)
        drained = drained.next()
    return drained
