"""Gather role, one warpgroup, for pages that TMA cannot load: copies K and V row by row, block by block.

Waits:   gather_mma_KV.free; for 8-bit K and V gather_convert_KV.free
Signals: gather_mma_KV.full; for 8-bit K and V gather_convert_KV.full

A block arrives when the copies of the next block have started, so the copies of two blocks are in flight. mma releases
V of a block only when K of the next one is full. So the ring holds three blocks: the one that mma waits for, the next
one, and the one that is being copied.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ...fwd.device.key_rows import KeyRows, copied_rows
from ...pipeline.cursor import Cursor, produce
from .context import Sm100ForwardContext
from .work import Queue, key_block


@cute.jit
def gather(context: Sm100ForwardContext):
    cfg, ends, smem = context.cfg, context.ends("gather"), context.smem
    if const_expr(cfg.converts_kv):
        kv, base, stage_bytes = produce(ends.gather_convert_KV), smem.address("KV bytes"), cfg.kv8_stage_bytes
    else:
        kv, base, stage_bytes = produce(ends.gather_mma_KV), smem.address("KV"), cfg.kv_stage_bytes
    copied = kv

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            rows = KeyRows.of(context, work, copied_rows(cfg))
            rows.load_pages(key_block(context, work, 0))
            for i in cutlass.range(work.count, unroll=1):
                block = key_block(context, work, i)
                kv.wait()
                rows.copy("k", block, base + kv.stage * stage_bytes)
                kv = kv.next()
                kv.wait()
                rows.copy("v", block, base + kv.stage * stage_bytes)
                kv = kv.next()
                cute.arch.cp_async_commit_group()
                rows.load_pages(key_block(context, work, i + 1))
                if i > 0:
                    cute.arch.cp_async_wait_group(1)
                    copied = arrive_block(copied)
            cute.arch.cp_async_wait_group(0)
            copied = arrive_block(copied)
        queue = queue.next()


def arrive_block(copied: Cursor) -> Cursor:
    """Arrive for K and V of a block."""
    copied.arrive()
    copied.next().arrive()
    return copied.next().next()
