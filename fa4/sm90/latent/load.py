"""Load role, one warp: TMA loads of Q and of key blocks, from last to first, part by part.

Waits:   load_both_left.free, load_both_right.free
Signals: load_both_Q.full, load_both_left.full, load_both_right.full, load_even_tail.full, load_odd_tail.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...fwd.device.load import load_q
from ...fwd.device.work import Work, work_tile
from ...pipeline.cursor import Cursor, Lane, produce
from ...pipeline.ends import Ends
from ...pipeline.tma import tma_load
from .config import HALVES, LatentConfig
from .context import LatentContext


@cute.jit
def load(context: LatentContext):
    ends = context.ends("load")
    q = produce(ends.load_both_Q)
    even, odd = part_cursors(context.cfg, ends)
    work = work_tile(context, Int32(cute.arch.block_idx()[0]))
    if work.count > 0:
        load_q(context, work, work.m_block, q)
        for i in cutlass.range(work.count // 2, unroll=1):
            even = load_block(context, work, 2 * i, 0, even)
            odd = load_block(context, work, 2 * i + 1, 1, odd)
        if work.count % 2 == 1:
            even = load_block(context, work, work.count - 1, 0, even)


def part_cursors(cfg: LatentConfig, ends: Ends) -> list[list[Cursor]]:
    """Return the cursors of a block's parts: left, right and, if there is one, the tail; for either warpgroup."""
    sides = ends.load_both_left, ends.load_both_right
    cursors = [[produce(end, Lane(half, HALVES)) for end in sides] for half in range(HALVES)]
    if not cfg.has_tail:
        return cursors
    return [[*parts, produce(tail)] for parts, tail in zip(cursors, (ends.load_even_tail, ends.load_odd_tail))]


def load_block(context: LatentContext, work: Work, n: Int32, half: int, parts: list[Cursor]) -> list[Cursor]:
    """Load the n-th block, one of warpgroup `half`."""
    cfg, tma, block_iter = context.cfg, context.tma("k"), work.block_iter
    block = block_iter.block(block_iter.ahead(block_iter.start(), n))
    pieces = work.keys.pieces_of(tma.tensor, work.head_kv, block, cfg.tile_n, cfg.pieces, cfg.seq_bounded_k)
    ptr = context.smem.pointer("K and P", cfg.dtype) + half * (cfg.stage_bytes // 2)
    for part, cursor in enumerate(parts):
        panels = slice(*cfg.part_bounds[part : part + 2])
        if part < HALVES:
            cursor.wait()
        cursor.expect_tx((panels.stop - panels.start) * cfg.k_tile.panel_bytes)
        for i, (x, tile) in enumerate(pieces):
            tma_load(tma, x, tile, ptr, cursor.barrier(), i, panels)
    return [cursor.next() for cursor in parts]
