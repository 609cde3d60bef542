"""Epilogue role, one warp: stores staged O tiles by TMA.

Waits:   correction_epilogue_O.full
Signals: correction_epilogue_O.free, load_mma_Q.free (if O is staged over Q)
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ...core.sequence import sequence_matrix
from ...fwd.variant import OutStore
from ...pipeline.cursor import ALL, consume
from ...pipeline.tma import tma_store
from .context import Sm100ForwardContext
from .work import Queue, row_tile


@cute.jit
def epilogue(context: Sm100ForwardContext):
    cfg = context.cfg
    ends = context.ends("epilogue")
    tma = context.tma("o")
    staged = consume(ends.correction_epilogue_O, ALL)

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            out = sequence_matrix(tma.tensor, work.head, work.batch, work.query_rows, cfg.varlen, cfg.seq_bounded_q)
            for tile in cutlass.range_constexpr(cfg.q_tiles):
                staged.wait(tile)
                smem_ptr = context.smem.pointer("O", cfg.dtype) + tile * (8 * cfg.o_step // cfg.dtype.width)
                tma_store(tma, out, row_tile(context, work, tile), smem_ptr)
                staged.arrive(tile)
                if const_expr(cfg.out_store is OutStore.TMA_OVER_Q):
                    ends.load_mma_Q.arrive_free(tile)
            staged = staged.next()
        queue = queue.next()
