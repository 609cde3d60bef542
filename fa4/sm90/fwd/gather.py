"""Gather role, one warpgroup: copies K and V row by row, block by block, for pages that TMA cannot load.

Waits:   gather_compute_K.free, gather_compute_V.free; of 8-bit numbers gather_convert_K.free, gather_convert_V.free
Signals: gather_compute_K.full, gather_compute_V.full; of 8-bit numbers gather_convert_K.full, gather_convert_V.full

A block arrives after the copies of the next block have started, so the copies of two blocks are in flight. Compute
releases a V after the next K has arrived. So the rings need a third stage: the block that compute waits for, the block
after it, and the block being copied.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ...fwd.device.key_rows import KeyRows, copied_rows
from ...fwd.device.queue import Queue
from ...pipeline.cursor import produce
from .context import Sm90ForwardContext


@cute.jit
def gather(context: Sm90ForwardContext):
    cfg, ends, smem = context.cfg, context.ends("gather"), context.smem
    if const_expr(cfg.converts_kv):
        k, v = produce(ends.gather_convert_K), produce(ends.gather_convert_V)
        k_base, v_base = smem.address("K bytes"), smem.address("V bytes")
    else:
        k, v = produce(ends.gather_compute_K), produce(ends.gather_compute_V)
        k_base, v_base = smem.address("K"), smem.address("V")
    copied_k, copied_v = k, v

    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            rows, block_iter = KeyRows.of(context, work, copied_rows(cfg)), work.block_iter
            start = block_iter.start()
            rows.load_pages(block_iter.block(start))
            for i in cutlass.range(work.count, unroll=1):
                block = block_iter.block(block_iter.ahead(start, i))
                k.wait()
                rows.copy("k", block, k_base + k.stage * cfg.k_tile.nbytes)
                v.wait()
                rows.copy("v", block, v_base + v.stage * cfg.v_tile.nbytes)
                cute.arch.cp_async_commit_group()
                k, v = k.next(), v.next()
                rows.load_pages(block_iter.block(block_iter.ahead(start, i + 1)))
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
