"""Convert role, one warpgroup, where K and V are 8-bit numbers: of the bytes that were loaded it makes the tiles that
products read, in their order.

Waits:   load_convert_K.full, load_convert_V.full, convert_compute_K.free, convert_compute_V.free
Signals: load_convert_K.free, load_convert_V.free, convert_compute_K.full, convert_compute_V.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from ...pipeline.cursor import consume, produce
from ...pipeline.widen import Widening
from .work import Queue


@cute.jit
def convert(context):
    cfg, ends, smem = context.cfg, context.ends("convert"), context.smem
    if cutlass.const_expr(cfg.gathers):
        raw_k, raw_v = consume(ends.gather_convert_K), consume(ends.gather_convert_V)
    else:
        raw_k, raw_v = consume(ends.load_convert_K), consume(ends.load_convert_V)
    k, v = produce(ends.convert_compute_K), produce(ends.convert_compute_V)
    of_k, of_v = (
        Widening(smem.address(f"{name} bytes"), smem.address(name), raw.nbytes, operand.nbytes, raw, operand, dtype)
        for name, raw, operand, dtype in (
            ("K", cfg.k_tile, cfg.k_operand, cfg.dtype),
            ("V", cfg.v_tile, cfg.v_operand, cfg.v_dtype),
        )
    )

    queue = Queue.first(context)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            raw_k, k = of_k.tile(raw_k, k)
            for _ in cutlass.range(work.count - 1, unroll=1):
                raw_k, k = of_k.tile(raw_k, k)
                raw_v, v = of_v.tile(raw_v, v)
            raw_v, v = of_v.tile(raw_v, v)
        queue = queue.next()
