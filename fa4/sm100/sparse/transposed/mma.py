"""MMA role, one warp, one elected thread: issues S, dP and dQ.

Per step: S and dP of the next step, then dQ of this one.

Waits:   load_mma_{Q,dO,left}.full, compute_mma_dS.full, mma_compute_{S,dP}.free, mma_mma_over_{S,dP}.full
Signals: mma_compute_{S,dP,dQ}.full, load_mma_left.free, compute_mma_dS.free
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ....bwd.device.list_work import work_tile
from ....core.constant import Constant
from ....pipeline.cursor import Cursor, consume, produce
from ....pipeline.ends import Ends
from ... import tmem
from ...mma import Major, SmemOperand, Umma, first_word
from ...stages import PANEL_COLUMNS
from .config import BY_COLUMNS, BY_KEYS, DS_TILE, HEADS, HEADS_PANEL, KEYS, Sm100TransposedConfig
from .context import Sm100TransposedContext

WORDS, STAGE_WORDS = HEADS_PANEL.nbytes >> 4, BY_COLUMNS.nbytes >> 4  # of a descriptor, to the next panel or stage


@cute.jit
def mma(context: Sm100TransposedContext):
    work = work_tile(context)
    if work.count > 0:
        issue(context, context.ends("mma"), work.blocks(context))


@cute.jit
def issue(context: Sm100TransposedContext, ends: cutlass.Constexpr[Ends], steps: Int32):
    cfg, low = context.cfg, Descriptors.of(context)
    left, ds = consume(ends.load_mma_left), consume(ends.compute_mma_dS)
    s, dp = produce(ends.mma_compute_S), produce(ends.mma_compute_dP)
    s_place, dp_place = consume(ends.mma_mma_over_S), consume(ends.mma_mma_over_dP)
    consume(ends.load_mma_Q).wait()
    left = issue_scores(low, low.s, low.q, cfg.q_tile.panels, left, s)
    consume(ends.load_mma_dO).wait()
    left = issue_scores(low, low.dp, low.do, cfg.do_tile.panels, left, dp)
    s, dp = s.next(), dp.next()
    for i in cutlass.range(steps, unroll=1):
        if i + 1 < steps:
            s_place.wait()
            s.wait()
            left = issue_scores(low, low.s, low.q, cfg.q_tile.panels, left, s)
            dp_place.wait()
            dp.wait()
            left = issue_scores(low, low.dp, low.do, cfg.do_tile.panels, left, dp)
        s, dp, s_place, dp_place = s.next(), dp.next(), s_place.next(), dp_place.next()
        ds.wait()
        left = issue_dq(low, cfg, i > 0, left)
        commit(ds)
        ds = ds.next()
    commit(produce(ends.mma_compute_dQ))


def commit(cursor: Cursor) -> None:
    with cute.arch.elect_one():
        cursor.commit()


@dataclass(frozen=True)
class Descriptors(Constant):
    """Low descriptor words of the first panels of Q and dO, of dS, and of the ring's first stage in its forms; and the
    tensor-memory addresses of results."""

    dtype: type[cutlass.Numeric]
    s: Int32
    dp: Int32
    dq: Int32
    q: Int32
    do: Int32
    ds: Int32
    by_columns: Int32
    by_keys: Int32
    odd_panel: Int32

    @staticmethod
    def of(context: Sm100TransposedContext) -> Descriptors:
        base, spans = tmem.base(context.smem), context.tmem
        q, do = (first_word(context.smem, region, HEADS_PANEL, Major.K) for region in ("Q", "dO"))
        forms = (BY_COLUMNS, Major.K), (BY_KEYS, Major.MN), (BY_COLUMNS, Major.MN)
        by_columns, by_keys, odd_panel = (first_word(context.smem, "left", *form) for form in forms)
        return Descriptors(
            context.cfg.dtype, base + spans.S, base + spans.dP, base + spans.dQ, q, do,
            first_word(context.smem, "dS", DS_TILE, Major.MN), by_columns, by_keys, odd_panel,
        )  # fmt: skip


@cute.jit
def issue_scores(
    low: cutlass.Constexpr[Descriptors], d: Int32, right: Int32, panels: cutlass.Constexpr[int], left: Cursor,
    scores: Cursor,
) -> Cursor:  # fmt: skip
    """Issue S or dP, panel by panel. Returns the cursor after the stages of K or V."""
    a, b = SmemOperand(BY_COLUMNS, Major.K), SmemOperand(HEADS_PANEL, Major.K)
    product = Umma(low.dtype, n=HEADS, k=PANEL_COLUMNS, b=b, a=a)
    for panel in cutlass.range(panels, unroll=1):
        left.wait()
        with cute.arch.elect_one():
            product.issue(d, low.by_columns + left.stage * STAGE_WORDS, right + panel * WORDS, panel > 0)
            left.commit()
        left = left.next()
    commit(scores)
    return left


@cute.jit
def issue_dq(
    low: cutlass.Constexpr[Descriptors], cfg: cutlass.Constexpr[Sm100TransposedConfig], accumulate: Boolean,
    left: Cursor,
) -> Cursor:  # fmt: skip
    """Issue dQ of a step: 128 columns of either half of the keys, finally an odd panel of all keys. Returns the cursor
    after its stages."""
    right = SmemOperand(DS_TILE, Major.MN)
    product = Umma(low.dtype, n=HEADS, k=BY_KEYS.rows, b=right, a=SmemOperand(BY_KEYS, Major.MN))
    for tile in cutlass.range(cfg.dq_tiles, unroll=1):
        for half in cutlass.range_constexpr(2):
            left.wait()
            with cute.arch.elect_one():
                a, b = low.by_keys + left.stage * STAGE_WORDS, low.ds + half * (DS_TILE.nbytes // 2 >> 4)
                product.issue(low.dq + tile * HEADS, a, b, accumulate if const_expr(half == 0) else True)
                left.commit()
            left = left.next()
    if const_expr(cfg.q_tile.panels % 2):
        odd = Umma(low.dtype, n=HEADS, k=KEYS, b=right, a=SmemOperand(BY_COLUMNS, Major.MN), m=PANEL_COLUMNS)
        left.wait()
        with cute.arch.elect_one():
            a = low.odd_panel + left.stage * STAGE_WORDS
            odd.issue(low.dq + cfg.dq_tiles * HEADS, a, low.ds, accumulate)
            left.commit()
        left = left.next()
    return left
