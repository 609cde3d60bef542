"""Epilogue role, one warp: stores staged O tiles by TMA.

Waits:   correction_epilogue_O.full
Signals: correction_epilogue_O.free, epilogue_load_Q.full

Tiles that correction writes to global memory itself pass through here too, with nothing to store.
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
    ends = context.ends("epilogue")
    tma = context.tma("o")
    phase = Int32(0)

    index = args.scheduler.first()
    while args.scheduler.has(index):
        work = work_tile(context, index)
        if work.count > 0:
            out = sequence_matrix(tma.tensor, work.head, work.batch, work.q.first, cfg.varlen)
            for tile in cutlass.range_constexpr(Q_TILES):
                ends.correction_epilogue_O.wait_full(tile, phase)
                if fills_tile(context, work, tile):
                    place = context.smem.pointer("O", cfg.dtype) + tile * (cfg.o_step // 2)
                    tma_store(tma, out, work.m_block * Q_TILES + tile, place)
                ends.correction_epilogue_O.arrive_free(tile)
                if cutlass.const_expr(cfg.o_over_q):
                    ends.epilogue_load_Q.arrive_full(tile)
            phase = phase ^ 1
        index = args.scheduler.next(index)
