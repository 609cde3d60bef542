"""Convert role, one warpgroup: converts K and V of 8 or 4 bits to the 16-bit tiles that the products read, in order.

Waits:   load_convert_K.full, load_convert_V.full, convert_compute_K.free, convert_compute_V.free
Signals: load_convert_K.free, load_convert_V.free, convert_compute_K.full, convert_compute_V.full

The bytes come through shared memory: TMA or, for few queries, the gather role loads them. For many queries and rows
that TMA cannot load, this role loads them into registers itself, one block ahead: beside two consumers there are no
registers for another warpgroup. So it does for all numbers of 4 bits, with their scales.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ...core.stored import Stored
from ...fwd.device.fetch import Fetch
from ...fwd.device.queue import Queue
from ...fwd.variant import KvLoad
from ...pipeline.cursor import Cursor, consume, produce
from ...pipeline.upconvert import ByteRing, Upconversion
from .context import Sm90ForwardContext


@cute.jit
def convert(context: Sm90ForwardContext):
    cfg, ends, smem = context.cfg, context.ends("convert"), context.smem
    k, v = produce(ends.convert_compute_K), produce(ends.convert_compute_V)
    of_k, of_v = (Stored(cfg.cache.dtype, dtype) for dtype in (cfg.dtype, cfg.v_dtype))
    to_k = Upconversion(smem.address("K"), cfg.k_operand.nbytes, cfg.k_operand, of_k)
    to_v = Upconversion(smem.address("V"), cfg.v_operand.nbytes, cfg.v_operand, of_v)
    if const_expr(cfg.kv_load is KvLoad.FETCH):
        convert_fetched(context, to_k, to_v, k, v)
    else:
        if const_expr(cfg.kv_load is KvLoad.GATHER):
            raw_k, raw_v = consume(ends.gather_convert_K), consume(ends.gather_convert_V)
        else:
            raw_k, raw_v = consume(ends.load_convert_K), consume(ends.load_convert_V)
        convert_smem(context, to_k, to_v, raw_k, raw_v, k, v)


@cute.jit
def convert_smem(
    context: Sm90ForwardContext,
    to_k: Upconversion,
    to_v: Upconversion,
    raw_k: Cursor,
    raw_v: Cursor,
    k: Cursor,
    v: Cursor,
):
    cfg, smem = context.cfg, context.smem
    k_bytes = ByteRing(smem.address("K bytes"), cfg.k_tile.nbytes, cfg.k_tile)
    v_bytes = ByteRing(smem.address("V bytes"), cfg.v_tile.nbytes, cfg.v_tile)
    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            raw_k, k = to_k.move(k_bytes, raw_k, k)
            for _ in cutlass.range(work.count - 1, unroll=1):
                raw_k, k = to_k.move(k_bytes, raw_k, k)
                raw_v, v = to_v.move(v_bytes, raw_v, v)
            raw_v, v = to_v.move(v_bytes, raw_v, v)
        queue = queue.next()


@cute.jit
def convert_fetched(context: Sm90ForwardContext, to_k: Upconversion, to_v: Upconversion, k: Cursor, v: Cursor):
    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            block_iter = work.block_iter
            start = block_iter.start()
            keys, values = Fetch.of(context, "k", work, to_k), Fetch.of(context, "v", work, to_v)
            blocks = [block_iter.block(block_iter.ahead(start, i)) for i in range(3)]
            for fetch in (keys, values):
                fetch.rows.load_pages(blocks[0])
                fetch.prefetch(blocks[0], blocks[1])
            k = to_k.put(k, keys.loaded())
            keys.prefetch(blocks[1], blocks[2])
            for i in cutlass.range(work.count - 1, unroll=1):
                k = to_k.put(k, keys.loaded())
                keys.prefetch(
                    block_iter.block(block_iter.ahead(start, i + 2)), block_iter.block(block_iter.ahead(start, i + 3))
                )
                v = to_v.put(v, values.loaded())
                values.prefetch(
                    block_iter.block(block_iter.ahead(start, i + 1)), block_iter.block(block_iter.ahead(start, i + 2))
                )
            v = to_v.put(v, values.loaded())
        queue = queue.next()
