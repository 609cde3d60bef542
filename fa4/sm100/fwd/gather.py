"""Gather role, one warpgroup, where pages do not hold what TMA takes: copies K and V row by row, block by block.

Waits:   gather_mma_KV.free; of 8-bit numbers gather_convert_KV.free
Signals: gather_mma_KV.full; of 8-bit numbers gather_convert_KV.full

A block is handed on when the next one's copies have been started, so that those of two are under way. The products let
go of a V when the K after it has come, so the ring has place for three blocks: the one that is waited for, its
successor, and the one that is being copied.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from ...fwd.gather import Gather
from ...pipeline.cursor import Cursor, produce
from .work import Queue, key_block


@cute.jit
def gather(context):
    cfg, ends, smem = context.cfg, context.ends("gather"), context.smem
    if cutlass.const_expr(cfg.has_bytes):
        kv, place, step = produce(ends.gather_convert_KV), smem.address("KV bytes"), cfg.byte_stage_bytes
    else:
        kv, place, step = produce(ends.gather_mma_KV), smem.address("KV"), cfg.kv_stage_bytes
    copied = kv

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            rows = Gather.of(context, work)
            rows.look_up(key_block(context, work, 0))
            for i in cutlass.range(work.count, unroll=1):
                block = key_block(context, work, i)
                kv.wait()
                rows.copy("k", block, place + kv.stage * step)
                kv = kv.next()
                kv.wait()
                rows.copy("v", block, place + kv.stage * step)
                kv = kv.next()
                cute.arch.cp_async_commit_group()
                rows.look_up(key_block(context, work, i + 1))
                if i > 0:
                    cute.arch.cp_async_wait_group(1)
                    copied = handed_on(copied)
            cute.arch.cp_async_wait_group(0)
            copied = handed_on(copied)
        queue = queue.next()


def handed_on(copied: Cursor) -> Cursor:
    """K and V of a block."""
    copied.arrive()
    copied.next().arrive()
    return copied.next().next()
