"""Load role, one warp: TMA loads of Q, and of parts of K and V in the order in which the products read them.

Waits:   load_compute_KV.free
Signals: load_compute_Q.full, load_compute_KV.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ....core.rows import clamp_tile
from ....fwd.device.load import load_q
from ....fwd.device.work import Work, work_tile
from ....pipeline.cursor import Cursor, Lane, produce
from ....pipeline.ends import Stage
from ....pipeline.smem import Tile
from ....pipeline.tma import tma_load_panel
from .config import CONSUMERS, KEYS_OF_V
from .context import WidestContext


@cute.jit
def load(context: WidestContext):
    ends, ctas = context.ends("load"), context.cfg.ctas
    work = work_tile(context, Int32(cute.arch.block_idx()[0]) // ctas)
    if work.count > 0:
        for consumer in cutlass.range_constexpr(CONSUMERS):
            row_tile = work.m_block * CONSUMERS + consumer
            load_q(context, work, row_tile, produce(ends.load_compute_Q, Lane(consumer, CONSUMERS)))
        steps, rank = (work.count + ctas - 1) // ctas, context.args.order.rank
        kv = load_k(context, work, rank, produce(ends.load_compute_KV))
        for step in cutlass.range(steps - 1, unroll=1):
            kv = load_k(context, work, ctas * (step + 1) + rank, kv)
            kv = load_pair_of_v(context, work, step, rank, kv)
        load_pair_of_v(context, work, steps - 1, rank, kv)


def load_k(context: WidestContext, work: Work, n: Int32, kv: Cursor) -> Cursor:
    """Load the n-th block of K."""
    cfg, tma = context.cfg, context.tma("k")
    block = nth_block(work, n)
    pieces = work.keys.pieces_of(tma.tensor, work.head_kv, block, cfg.tile_n, cfg.pieces, cfg.seq_bounded_k)
    for panels in cfg.parts_of_k:
        kv.wait()
        kv.expect_tx(len(panels) * tma.tile.panel_bytes)
        for i, panel in enumerate(panels):
            ptr = panel_of(context, kv.stage, i, tma.tile)
            for piece, (x, tile) in enumerate(pieces):
                tma_load_panel(tma, x, tile, panel, ptr, kv.barrier(), piece)
        kv = kv.next()
    return kv


def load_pair_of_v(context: WidestContext, work: Work, step: Int32, rank: Int32, kv: Cursor) -> Cursor:
    """Load the columns of V of this CTA for the keys of both, its own first."""
    for r in (rank, rank ^ 1):
        kv = load_v(context, work, context.cfg.ctas * step + r, rank, kv)
    return kv


def load_v(context: WidestContext, work: Work, n: Int32, rank: Int32, kv: Cursor) -> Cursor:
    """Load columns of the n-th block of V."""
    cfg, tma = context.cfg, context.tma("v")
    block = nth_block(work, n)
    for part in range(cfg.parts_of_v):
        tile = block * cfg.parts_of_v + part
        if cfg.lengths_vary or cfg.cache is not None:  # the part may be past the last key
            tile = clamp_tile(tile, work.keys.rows, KEYS_OF_V)
        pieces = work.keys.pieces_of(tma.tensor, work.head_kv, tile, KEYS_OF_V, tma.tile.pieces, cfg.seq_bounded_k)
        kv.wait()
        kv.expect_tx(cfg.half_panels * tma.tile.panel_bytes)
        for i in range(cfg.half_panels):
            panel = cutlass.min(rank * cfg.half_panels + i, tma.tile.panels - 1)
            ptr = panel_of(context, kv.stage, i, tma.tile)
            for piece, (x, row_tile) in enumerate(pieces):
                tma_load_panel(tma, x, row_tile, panel, ptr, kv.barrier(), piece)
        kv = kv.next()
    return kv


def nth_block(work: Work, n: Int32) -> Int32:
    """The n-th block of keys of a work tile; the last one instead of one that does not exist."""
    block_iter = work.block_iter
    return block_iter.block(block_iter.ahead(block_iter.start(), cutlass.min(n, work.count - 1)))


def panel_of(context: WidestContext, stage: Stage, index: int, tile: Tile) -> cute.Pointer:
    """Return the place of the index-th panel in a stage."""
    nbytes = Int32(stage) * context.cfg.stage_bytes + index * tile.panel_bytes
    return context.smem.pointer("KV", context.cfg.dtype) + nbytes // 2
