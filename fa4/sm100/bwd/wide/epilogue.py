"""End of the compute role: stores the gradient, staged over the left operand of S.

That is free when D is complete: the products that read it were issued before.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....core.sequence import Rows, sequence_matrix
from ....core.vec_io import pack_half
from ....pipeline.cursor import consume
from ....pipeline.ends import Ends
from ....pipeline.smem import store_row
from ....pipeline.tma import tma_store
from ... import tmem
from ..compute import half_of_warp
from ..config import CHUNK, HALVES, TILE_N
from .config import Sm100WideContext
from .work import WideWork


@cute.jit
def store_gradient(context: Sm100WideContext, ends: Ends, work: WideWork, rows: Rows, scale: Float32):
    """Scale D and store it; zeros if there were no steps. Each warpgroup converts half of the columns."""
    cfg, tma, smem_address = context.cfg, context.tma("grad"), context.smem.address("leftS")
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    lane = cute.arch.thread_idx()[0] % TILE_N
    columns = cfg.grad_columns // HALVES
    d_address = tmem.lane_address(context.tmem.D, warp)
    if work.steps > 0:
        consume(ends.mma_compute_D).wait()
    for i_half in cutlass.range_constexpr(HALVES):
        if half_of_warp() == i_half:
            for column in cutlass.range_constexpr(i_half * columns, (i_half + 1) * columns, CHUNK):
                if column < tma.tile.panels * tma.tile.panel_columns:
                    packed = [Int32(0)] * (CHUNK // 2)
                    if work.steps > 0:
                        x = tmem.load(d_address + column, CHUNK)
                        tmem.wait_loads()
                        for j in cutlass.range_constexpr(0, CHUNK, 2):
                            pair = cute.arch.mul_packed_f32x2((x[j], x[j + 1]), (scale, scale))
                            packed[j // 2] = pack_half(pair[0], pair[1], cfg.dtype)
                    store_row(smem_address, tma.tile, lane, column, packed)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=context.gradient_staged, number_of_threads=HALVES * TILE_N)
    if warp == 0:
        matrix = sequence_matrix(tma.tensor, work.own_head, work.batch, rows, cfg.varlen, cfg.lengths_vary)
        tma_store(tma, matrix, work.own_block, context.smem.pointer("leftS", cfg.dtype))
