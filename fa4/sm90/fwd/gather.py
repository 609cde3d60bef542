"""Gather role, one warpgroup, where pages do not hold what TMA takes: copies K and V row by row, block by block.

Waits:   gather_compute_K.free, gather_compute_V.free; of 8-bit numbers gather_convert_K.free, gather_convert_V.free
Signals: gather_compute_K.full, gather_compute_V.full; of 8-bit numbers gather_convert_K.full, gather_convert_V.full

A block is handed on when the next one's copies have been started, so that those of two are under way. Compute lets go
of a V when the K after it has come, so the rings have a stage more: the block that is waited for, its successor, and
the one that is being copied.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from ...fwd.gather import Gather
from ...pipeline.cursor import produce
from .work import Queue


@cute.jit
def gather(context):
    cfg, ends, smem = context.cfg, context.ends("gather"), context.smem
    if cutlass.const_expr(cfg.has_bytes):
        k, v = produce(ends.gather_convert_K), produce(ends.gather_convert_V)
        k_place, v_place = smem.address("K bytes"), smem.address("V bytes")
    else:
        k, v = produce(ends.gather_compute_K), produce(ends.gather_compute_V)
        k_place, v_place = smem.address("K"), smem.address("V")
    copied_k, copied_v = k, v

    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            rows, block_iter = Gather.of(context, work), work.block_iter
            start = block_iter.start()
            rows.look_up(block_iter.block(start))
            for i in cutlass.range(work.count, unroll=1):
                block = block_iter.block(block_iter.ahead(start, i))
                k.wait()
                rows.copy("k", block, k_place + k.stage * cfg.k_tile.nbytes)
                v.wait()
                rows.copy("v", block, v_place + v.stage * cfg.v_tile.nbytes)
                cute.arch.cp_async_commit_group()
                k, v = k.next(), v.next()
                rows.look_up(block_iter.block(block_iter.ahead(start, i + 1)))
                if i > 0:
                    cute.arch.cp_async_wait_group(1)
                    copied_k.arrive()
                    copied_v.arrive()
                    copied_k, copied_v = copied_k.next(), copied_v.next()
            cute.arch.cp_async_wait_group(0)
            copied_k.arrive()
            copied_v.arrive()
            copied_k, copied_v = copied_k.next(), copied_v.next()
        queue = queue.next()
