"""Load role, one warp: loads Q, K and V by TMA, or Q alone. Each CTA of the pair loads half of K's rows and half of V's
columns.

Waits:   load_mma_KV.free
Signals: load_mma_Q.full (or load_softmax_Q.full), load_mma_KV.full, in the order in which the products read the stages:
         K of a block, then V of the previous one
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ....core.rows import clamp_tile
from ....core.sequence import sequence_matrix
from ....fwd.device.work import Work
from ....fwd.variant import KvLoad
from ....pipeline.cursor import Cursor, produce
from ....pipeline.tma import tma_load
from ...stage_products import Pieces, load_by_panels, load_by_rows
from ...stages import CTA_ROWS, PAIR
from ..work import key_block
from .context import WidestContext
from .gather import gather_blocks
from .work import work_of_pair


@cute.jit
def load(context: WidestContext):
    ends = context.ends("load")
    work = work_of_pair(context)
    if work.count > 0:
        load_q(context, work, produce(ends.load_softmax_Q if const_expr(context.cfg.scales_q) else ends.load_mma_Q))
        if const_expr(context.cfg.kv_load is KvLoad.TMA):
            load_blocks(context, work, produce(ends.load_mma_KV))
        if const_expr(context.cfg.kv_load is KvLoad.ROWS):
            gather_blocks(context, work, produce(ends.load_mma_KV))


@cute.jit
def load_blocks(context: WidestContext, work: Work, kv: Cursor):
    """Load all key blocks."""
    kv = load_k(context, work, Int32(0), kv)
    for i in cutlass.range(1, work.count, unroll=1):
        kv = load_k(context, work, i, kv)
        kv = load_v(context, work, i - 1, kv)
    load_v(context, work, work.count - 1, kv)


def load_q(context: WidestContext, work: Work, cursor: Cursor) -> None:
    """Load this CTA's rows of Q."""
    cfg, tma, rank = context.cfg, context.tma("q"), context.args.order.rank
    q = sequence_matrix(tma.tensor, work.head, work.batch, work.query_rows, cfg.varlen)
    cursor.expect_tx(tma.tile.nbytes, rank)
    tma_load(tma, q, work.m_block * PAIR + rank, context.smem.pointer("Q", cfg.dtype), cursor.barrier())


def load_k(context: WidestContext, work: Work, i: Int32, kv: Cursor) -> Cursor:
    """Load this CTA's keys of the i-th block. Returns the cursor after it."""
    rank = context.args.order.rank
    pieces = pieces_of(context, work, "k", key_block(context, work, i) * PAIR + rank, context.cfg.keys)
    return load_by_panels(context.tma("k"), pieces, ring(context), kv, rank)


def load_v(context: WidestContext, work: Work, i: Int32, kv: Cursor) -> Cursor:
    """Load this CTA's columns of V of the i-th block. Returns the cursor after it."""
    groups = context.cfg.tile_n // CTA_ROWS
    first = key_block(context, work, i) * groups
    pieces = [pieces_of(context, work, "v", first + group, CTA_ROWS) for group in range(groups)]
    return load_by_rows(context.tma("v"), pieces, ring(context), kv, context.args.order.rank)


def pieces_of(context: WidestContext, work: Work, name: str, n: Int32, keys: int) -> Pieces:
    """The n-th group of `keys` keys of K ("k") or V ("v")."""
    cfg, tma = context.cfg, context.tma(name)
    if cfg.seq_bounded_k:
        n = clamp_tile(n, work.k, keys)
    return work.keys.pieces_of(tma.tensor, work.head_kv, n, keys, tma.tile.pieces, cfg.seq_bounded_k)


def ring(context: WidestContext) -> cute.Pointer:
    return context.smem.pointer("KV", context.cfg.dtype)
