"""Convert role, one warpgroup, where K and V are 8-bit numbers: of the bytes that were loaded it makes the tiles that
products read, in their order.

Waits:   load_convert_KV.full, convert_mma_KV.free
Signals: load_convert_KV.free, convert_mma_KV.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from ...pipeline.cursor import consume, produce
from ...pipeline.upconvert import ByteRing, Upconversion
from .work import Queue


@cute.jit
def convert(context):
    cfg, ends, smem = context.cfg, context.ends("convert"), context.smem
    raw = consume(ends.gather_convert_KV if cfg.plain_keys else ends.load_convert_KV)
    wide = produce(ends.convert_mma_KV)
    of_k = Upconversion(smem.address("KV"), cfg.kv_stage_bytes, cfg.k_operand, cfg.cache.dtype, cfg.dtype)
    of_v = Upconversion(smem.address("KV"), cfg.kv_stage_bytes, cfg.v_operand, cfg.cache.dtype, cfg.v_dtype)
    k_bytes = ByteRing(smem.address("KV bytes"), cfg.byte_stage_bytes, cfg.k_tile)
    v_bytes = ByteRing(smem.address("KV bytes"), cfg.byte_stage_bytes, cfg.v_tile)

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        for _ in cutlass.range(work.count, unroll=1):
            raw, wide = of_k.move(k_bytes, raw, wide)
            raw, wide = of_v.move(v_bytes, raw, wide)
        queue = queue.next()
