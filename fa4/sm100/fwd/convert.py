"""Convert role, one warpgroup, for K and V of 8 or 4 bits: upconverts them to the 16-bit tiles that products read.

Waits:   load_convert_KV.full (or gather_convert_KV.full), convert_mma_KV.free
Signals: load_convert_KV.free (or gather_convert_KV.free), convert_mma_KV.full

Bytes of 8-bit tiles come through shared memory. Rows of 4 bits, and their scales, are loaded into registers by this
role, one block ahead.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ...core.stored import Stored
from ...fwd.device.fetch import Fetch
from ...fwd.variant import KvLoad
from ...pipeline.cursor import Cursor, consume, produce
from ...pipeline.ends import Ends
from ...pipeline.upconvert import ByteRing, Upconversion
from .context import Sm100ForwardContext
from .work import Queue, key_block


@cute.jit
def convert(context: Sm100ForwardContext):
    cfg, ends, smem = context.cfg, context.ends("convert"), context.smem
    converted = produce(ends.convert_mma_KV)
    to_k, to_v = (
        Upconversion(
            smem.address("KV"),
            cfg.kv_stage_bytes,
            tile,
            Stored(cfg.cache.dtype, dtype, has_cvt_e2m1=cfg.has_cvt_e2m1),
        )
        for tile, dtype in ((cfg.k_operand, cfg.dtype), (cfg.v_operand, cfg.v_dtype))
    )
    if const_expr(cfg.kv_load is KvLoad.FETCH):
        convert_fetched(context, ends, to_k, to_v, converted)
    else:
        convert_smem(context, ends, to_k, to_v, converted)


@cute.jit
def convert_smem(context: Sm100ForwardContext, ends: Ends, to_k: Upconversion, to_v: Upconversion, converted: Cursor):
    cfg, smem = context.cfg, context.smem
    raw = consume(ends.gather_convert_KV if const_expr(cfg.kv_load is KvLoad.GATHER) else ends.load_convert_KV)
    k_ring = ByteRing(smem.address("KV bytes"), cfg.kv8_stage_bytes, cfg.k_tile)
    v_ring = ByteRing(smem.address("KV bytes"), cfg.kv8_stage_bytes, cfg.v_tile)

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        for _ in cutlass.range(work.count, unroll=1):
            raw, converted = to_k.move(k_ring, raw, converted)
            raw, converted = to_v.move(v_ring, raw, converted)
        queue = queue.next()


@cute.jit
def convert_fetched(
    context: Sm100ForwardContext, ends: Ends, to_k: Upconversion, to_v: Upconversion, converted: Cursor
):
    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            keys, values = Fetch.of(context, "k", work, to_k), Fetch.of(context, "v", work, to_v)
            for fetch in (keys, values):
                fetch.rows.load_pages(key_block(context, work, 0))
                fetch.prefetch(key_block(context, work, 0), key_block(context, work, 1))
            for i in cutlass.range(work.count, unroll=1):
                converted = to_k.put(converted, keys.loaded())
                keys.prefetch(key_block(context, work, i + 1), key_block(context, work, i + 2))
                converted = to_v.put(converted, values.loaded())
                values.prefetch(key_block(context, work, i + 1), key_block(context, work, i + 2))
        queue = queue.next()
