"""Convert role, one warpgroup, where K and V are 8-bit numbers: of the bytes it makes the tiles that products read, in
their order.

Waits:   load_convert_K.full, load_convert_V.full, convert_compute_K.free, convert_compute_V.free
Signals: load_convert_K.free, load_convert_V.free, convert_compute_K.full, convert_compute_V.full

The bytes come through shared memory, where TMA or, for few queries, the gather role brings them. For many queries on
rows that TMA does not bring, this role fetches them itself, a block ahead, into registers: beside two teams that
compute there are none for a warpgroup more.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from ...pipeline.cursor import Cursor, consume, produce
from ...pipeline.upconvert import ByteRing, Upconversion
from .fetch import Fetch
from .work import Queue


@cute.jit
def convert(context):
    cfg, ends, smem = context.cfg, context.ends("convert"), context.smem
    k, v = produce(ends.convert_compute_K), produce(ends.convert_compute_V)
    of_k = Upconversion(smem.address("K"), cfg.k_operand.nbytes, cfg.k_operand, cfg.cache.dtype, cfg.dtype)
    of_v = Upconversion(smem.address("V"), cfg.v_operand.nbytes, cfg.v_operand, cfg.cache.dtype, cfg.v_dtype)
    if cutlass.const_expr(cfg.fetches):
        from_global(context, of_k, of_v, k, v)
    else:
        if cutlass.const_expr(cfg.gathers):
            raw_k, raw_v = consume(ends.gather_convert_K), consume(ends.gather_convert_V)
        else:
            raw_k, raw_v = consume(ends.load_convert_K), consume(ends.load_convert_V)
        from_shared(context, of_k, of_v, raw_k, raw_v, k, v)


@cute.jit
def from_shared(context, of_k, of_v, raw_k: Cursor, raw_v: Cursor, k: Cursor, v: Cursor):
    cfg, smem = context.cfg, context.smem
    k_bytes = ByteRing(smem.address("K bytes"), cfg.k_tile.nbytes, cfg.k_tile)
    v_bytes = ByteRing(smem.address("V bytes"), cfg.v_tile.nbytes, cfg.v_tile)
    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            raw_k, k = of_k.move(k_bytes, raw_k, k)
            for _ in cutlass.range(work.count - 1, unroll=1):
                raw_k, k = of_k.move(k_bytes, raw_k, k)
                raw_v, v = of_v.move(v_bytes, raw_v, v)
            raw_v, v = of_v.move(v_bytes, raw_v, v)
        queue = queue.next()


@cute.jit
def from_global(context, of_k, of_v, k: Cursor, v: Cursor):
    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            block_iter = work.block_iter
            start = block_iter.start()
            keys, values = Fetch.of(context, "k", work, of_k), Fetch.of(context, "v", work, of_v)
            blocks = [block_iter.block(block_iter.ahead(start, i)) for i in range(3)]
            for of_x in (keys, values):
                of_x.look_up(blocks[0])
                of_x.ask(blocks[0], blocks[1])
            k = of_k.put(k, keys.words())
            keys.ask(blocks[1], blocks[2])
            for i in cutlass.range(work.count - 1, unroll=1):
                k = of_k.put(k, keys.words())
                keys.ask(
                    block_iter.block(block_iter.ahead(start, i + 2)), block_iter.block(block_iter.ahead(start, i + 3))
                )
                v = of_v.put(v, values.words())
                values.ask(
                    block_iter.block(block_iter.ahead(start, i + 1)), block_iter.block(block_iter.ahead(start, i + 2))
                )
            v = of_v.put(v, values.words())
        queue = queue.next()
