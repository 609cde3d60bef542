"""Convert role, one warpgroup, for 8-bit K and V: upconverts the loaded tiles to the 16-bit tiles that products read.

Waits:   load_convert_KV.full (or gather_convert_KV.full), convert_mma_KV.free
Signals: load_convert_KV.free (or gather_convert_KV.free), convert_mma_KV.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ...fwd.variant import KvLoad
from ...pipeline.cursor import consume, produce
from ...pipeline.upconvert import ByteRing, Upconversion
from .config import Sm100ForwardContext
from .work import Queue


@cute.jit
def convert(context: Sm100ForwardContext):
    cfg, ends, smem = context.cfg, context.ends("convert"), context.smem
    raw = consume(ends.gather_convert_KV if const_expr(cfg.kv_load is KvLoad.GATHER) else ends.load_convert_KV)
    converted = produce(ends.convert_mma_KV)
    to_k = Upconversion(smem.address("KV"), cfg.kv_stage_bytes, cfg.k_operand, cfg.cache.dtype, cfg.dtype)
    to_v = Upconversion(smem.address("KV"), cfg.kv_stage_bytes, cfg.v_operand, cfg.cache.dtype, cfg.v_dtype)
    k_ring = ByteRing(smem.address("KV bytes"), cfg.kv8_stage_bytes, cfg.k_tile)
    v_ring = ByteRing(smem.address("KV bytes"), cfg.kv8_stage_bytes, cfg.v_tile)

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        for _ in cutlass.range(work.count, unroll=1):
            raw, converted = to_k.move(k_ring, raw, converted)
            raw, converted = to_v.move(v_ring, raw, converted)
        queue = queue.next()
