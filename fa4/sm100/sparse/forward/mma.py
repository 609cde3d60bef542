"""MMA role, one warp, one elected thread: issues S of the next block, then O^T += V^T P^T of this one.

Waits:   load_mma_{Q,K}.full, softmax_mma_{Q,P}.full, mma_softmax_S.free
Signals: mma_softmax_S.full, load_mma_K.free, softmax_mma_P.free
"""

from __future__ import annotations

import functools
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
from ...stages import PANEL_COLUMNS, STAGE_BYTES
from .config import BY_KEYS, HEADS, KEYS, KEYS_PANEL, P_TILE, WORD_COLUMNS, Sm100ListsForwardConfig
from .context import ListsForwardContext

_PANEL_WORDS, _STAGE_WORDS = KEYS_PANEL.nbytes >> 4, STAGE_BYTES >> 4  # of a descriptor, to the next one


@cute.jit
def mma(context: ListsForwardContext):
    work = work_tile(context)
    if work.count > 0:
        issue(context, context.ends("mma"), work.blocks(context))


@cute.jit
def issue(context: ListsForwardContext, ends: cutlass.Constexpr[Ends], blocks: Int32):
    cfg, operands = context.cfg, Operands.of(context)
    of_s, of_o = consume(ends.load_mma_K), consume(ends.load_mma_K)
    s, p = produce(ends.mma_softmax_S), consume(ends.softmax_mma_P)
    if const_expr(cfg.q_panels_in_smem > 0):
        consume(ends.load_mma_Q).wait()
    consume(ends.softmax_mma_Q).wait()
    of_s = issue_s(operands, cfg, of_s, s)
    s = s.next()
    for i in cutlass.range(blocks, unroll=1):
        if i + 1 < blocks:
            of_s = issue_s(operands, cfg, of_s, s)
        s = s.next()
        p.wait()
        of_o = issue_o(operands, cfg, i > 0, of_o)
        with cute.arch.elect_one():
            p.commit()
        p = p.next()


@dataclass(frozen=True)
class Operands(Constant):
    """q_words, s, o: tensor-memory addresses. Others: low descriptor words of first panels."""

    dtype: type[cutlass.Numeric]
    q_words: Int32
    s: Int32
    o: Int32
    q: Int32
    p: Int32
    panels: Int32
    by_keys: Int32

    @staticmethod
    def of(context: ListsForwardContext) -> Operands:
        base, spans = tmem.base(context.smem), context.tmem
        word = functools.partial(first_word, context.smem)
        return Operands(
            context.cfg.dtype, base + spans.Q, base + spans.S, base + spans.O, word("Q", KEYS_PANEL, Major.K),
            word("P", P_TILE, Major.K), word("K", KEYS_PANEL, Major.K), word("K", BY_KEYS, Major.MN),
        )  # fmt: skip


@cute.jit
def issue_s(
    operands: cutlass.Constexpr[Operands], cfg: cutlass.Constexpr[Sm100ListsForwardConfig], keys: Cursor, s: Cursor
) -> Cursor:
    """Issue S of a block. Returns the cursor after its stages."""
    b = SmemOperand(KEYS_PANEL, Major.K)
    s.wait()
    for stage in cutlass.range_constexpr(cfg.stages_of_block):
        keys.wait()
        with cute.arch.elect_one():
            ring = operands.panels + keys.stage * _STAGE_WORDS
            for panel in cutlass.range_constexpr(2 * stage, min(2 * stage + 2, cfg.q_tile.panels)):
                in_tmem = const_expr(panel < cfg.q_panels_in_tmem)
                a = None if in_tmem else SmemOperand(KEYS_PANEL, Major.K)
                product = Umma(operands.dtype, n=KEYS, k=PANEL_COLUMNS, b=b, a=a, m=HEADS)
                left = operands.q + (panel - cfg.q_panels_in_tmem) * _PANEL_WORDS
                if const_expr(in_tmem):
                    left = operands.q_words + panel * WORD_COLUMNS
                product.issue(operands.s, left, ring + panel % 2 * _PANEL_WORDS, Boolean(panel > 0))
            if const_expr(stage >= cfg.o_tiles):  # no columns of V
                keys.commit()
        keys = keys.next()
    with cute.arch.elect_one():
        s.commit()
    return keys


@cute.jit
def issue_o(
    operands: cutlass.Constexpr[Operands], cfg: cutlass.Constexpr[Sm100ListsForwardConfig], accumulate: Boolean,
    keys: Cursor,
) -> Cursor:  # fmt: skip
    """Issue O^T += V^T P^T of a block, whose stages are full. Returns the cursor after these."""
    a, b = SmemOperand(BY_KEYS, Major.MN), SmemOperand(P_TILE, Major.K)
    product = Umma(operands.dtype, n=HEADS, k=KEYS, b=b, a=a)
    for stage in cutlass.range_constexpr(cfg.stages_of_block):
        if const_expr(stage < cfg.o_tiles):
            with cute.arch.elect_one():
                ring = operands.by_keys + keys.stage * _STAGE_WORDS
                product.issue(operands.o + stage * HEADS, ring, operands.p, accumulate)
                keys.commit()
        keys = keys.next()
    return keys
