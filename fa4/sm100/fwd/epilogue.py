"""Epilogue role, one warp: stores staged O tiles by TMA.

Waits:   correction_epilogue_O.full
Signals: correction_epilogue_O.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..copy import tma_store
from .config import Q_TILES
from .work import fills_tile, sequence_matrix, work_tile


@cute.jit
def epilogue(context):
    cfg, args = context.cfg, context.args
    channel = context.ends("epilogue").correction_epilogue_O
    tma = context.tma("o")
    stored = Int32(0)  # parity of each stage, one bit per Q tile

    index = args.scheduler.first()
    while args.scheduler.has(index):
        work = work_tile(context, index)
        if work.count > 0:
            out = sequence_matrix(tma.tensor, work.head, work.batch, work.q.first, cfg.varlen)
            for tile in cutlass.range_constexpr(Q_TILES):
                whole = fills_tile(context, work, tile)
                if whole:
                    place = context.smem.pointer("O", cfg.dtype) + tile * (cfg.o_tile.nbytes // 2)
                    channel.wait_full(tile, stored >> tile & 1)
                    tma_store(tma, out, work.m_block * Q_TILES + tile, place)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                    channel.arrive_free(tile)
                stored = stored ^ (Int32(whole) << tile)
        index = args.scheduler.next(index)
