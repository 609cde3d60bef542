"""The end of the compute role: dV by the first warpgroup, dK by the second, through the places of V and K.

V is free once dV is complete (the last product that reads it came before), K once dK is: the products that read it,
the last dQ among them, are committed with it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.sequence import sequence_matrix
from ...core.vec_io import pack_half
from ...pipeline.cursor import consume
from ...pipeline.smem import store_row
from ...pipeline.tma import tma_store
from .. import tmem
from .config import CHUNK, TILE_N

AT_ONCE = 128  # columns in a thread's registers


@cute.jit
def store_gradients(context, ends, work):
    """dV and dK from tensor memory to global memory; zeros if no query sees a key of the block."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < 4:
        if work.steps > 0:
            consume(ends.mma_compute_dV).wait()
        store_gradient(context, work, "V", "dv", context.tmem.dV, context.cfg.columns_v, Float32(1.0))
    else:
        if work.steps > 0:
            consume(ends.mma_compute_dK).wait()
        store_gradient(context, work, "K", "dk", context.tmem.dK, context.cfg.columns, context.args.scale)


@cute.jit
def store_gradient(
    context,
    work,
    region: cutlass.Constexpr[str],
    name: cutlass.Constexpr[str],
    span: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
    scale: Float32,
):
    """One warpgroup: columns of tensor memory from `span`, times `scale`, staged in `region`, stored by TMA."""
    cfg = context.cfg
    tma = context.tma(name)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.thread_idx()[0] % TILE_N
    place = context.smem.address(region)
    if work.steps > 0:
        for first in cutlass.range_constexpr(0, columns, AT_ONCE):
            batch = range(first, min(first + AT_ONCE, columns), CHUNK)
            loaded = [tmem.load(tmem.lane_address(span, warp) + column, CHUNK) for column in batch]
            tmem.wait_loads()
            for column, x in zip(batch, loaded):
                pairs = [(x[i], x[i + 1]) for i in range(0, CHUNK, 2)]
                scaled = [cute.arch.mul_packed_f32x2(pair, (scale, scale)) for pair in pairs]
                store_row(place, tma.tile, lane, column, [pack_half(*pair, cfg.dtype) for pair in scaled])
    else:
        for column in cutlass.range_constexpr(0, columns, CHUNK):
            store_row(place, tma.tile, lane, column, [Int32(0)] * (CHUNK // 2))
    cute.arch.fence_proxy("async.shared", space="cta")
    barrier = context.gradient_staged + warp // 4
    cute.arch.barrier(barrier_id=barrier, number_of_threads=TILE_N)
    if warp % 4 == 0:
        matrix = sequence_matrix(tma.tensor, work.head_kv, work.batch, work.k, cfg.varlen, cfg.lengths_vary)
        tma_store(tma, matrix, work.own_block, context.smem.pointer(region, cfg.dtype))
