"""End of the compute role: the first warpgroup stores dV, the second dK, staged over V and K in shared memory.

V is free when dV is complete, because the last product that reads V came before. K is free when dK is complete: the
products that read K, including the last dQ, are committed with dK.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.sequence import sequence_matrix
from ...core.vec_io import pack_half
from ...pipeline.cursor import consume
from ...pipeline.ends import Ends
from ...pipeline.row_chunks import store_row
from ...pipeline.tma import tma_store
from ...runtime.spec import GradientFactor
from .. import tmem
from .config import CHUNK, TILE_N
from .context import Sm100BackwardContext
from .work import Sm100BackwardWork

COLUMNS_PER_BATCH = 128  # columns in registers at a time


@cute.jit
def store_gradients(context: Sm100BackwardContext, ends: Ends, work: Sm100BackwardWork):
    """Store dV and dK from tensor memory to global memory; zeros if no query sees a key of the block."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if warp < 4:
        if work.steps > 0:
            consume(ends.mma_compute_dV).wait()
        scale = factor(context, work, GradientFactor.DV)
        store_gradient(context, work, "V", "dv", context.tmem.dV, context.cfg.columns_v, scale)
    else:
        if work.steps > 0:
            consume(ends.mma_compute_dK).wait()
        scale = context.args.scale * factor(context, work, GradientFactor.DK)
        store_gradient(context, work, "K", "dk", context.tmem.dK, context.cfg.columns, scale)


def factor(context: Sm100BackwardContext, work: Sm100BackwardWork, which: GradientFactor) -> Float32:
    """Of a gradient's sums; 1 for 16-bit operands."""
    if context.cfg.operands is None:
        return Float32(1.0)
    return Float32(context.args.factors[which, work.batch, work.head_kv])


@cute.jit
def store_gradient(
    context: Sm100BackwardContext,
    work: Sm100BackwardWork,
    region: cutlass.Constexpr[str],
    name: cutlass.Constexpr[str],
    first_column: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
    scale: Float32,
):
    """One warpgroup: scale TMEM columns from `first_column`, stage them in `region` and store them by TMA."""
    cfg = context.cfg
    tma = context.tma(name)
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.thread_idx()[0] % TILE_N
    smem_address = context.smem.address(region)
    if work.steps > 0:
        for start in cutlass.range_constexpr(0, columns, COLUMNS_PER_BATCH):
            batch = range(start, min(start + COLUMNS_PER_BATCH, columns), CHUNK)
            loaded = [tmem.load(tmem.lane_address(first_column, warp) + column, CHUNK) for column in batch]
            tmem.wait_loads()
            for column, x in zip(batch, loaded):
                pairs = [(x[i], x[i + 1]) for i in range(0, CHUNK, 2)]
                scaled = [cute.arch.mul_packed_f32x2(pair, (scale, scale)) for pair in pairs]
                store_row(smem_address, tma.tile, lane, column, [pack_half(x, y, cfg.dtype) for x, y in scaled])
    else:
        for column in cutlass.range_constexpr(0, columns, CHUNK):
            store_row(smem_address, tma.tile, lane, column, [Int32(0)] * (CHUNK // 2))
    cute.arch.fence_proxy("async.shared", space="cta")
    barrier = context.gradient_staged + warp // 4
    cute.arch.barrier(barrier_id=barrier, number_of_threads=TILE_N)
    if warp % 4 == 0:
        matrix = sequence_matrix(tma.tensor, work.head_kv, work.batch, work.k, cfg.varlen, cfg.lengths_vary)
        tma_store(tma, matrix, work.own_block, context.smem.pointer(region, cfg.dtype))
