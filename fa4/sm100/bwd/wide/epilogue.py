"""End of the compute role: stores the gradient, staged over the left operand of S.

That is free when D is complete: the products that read it were issued before.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ....core.rows import Rows
from ....core.sequence import sequence_matrix
from ....core.vec_io import pack_half
from ....pipeline.cursor import consume
from ....pipeline.ends import Ends
from ....pipeline.row_chunks import store_row
from ....pipeline.tma import tma_store
from ... import tmem
from ...tensor_memory import LANES
from ..compute import half_of_warp, own_row
from ..config import CHUNK, HALVES
from .context import Sm100WideContext
from .work import WideWork


@cute.jit
def store_gradient(context: Sm100WideContext, ends: Ends, work: WideWork, rows: Rows, scale: Float32):
    """Scale D and store it; zeros if there were no steps. Each warpgroup converts half of a lane's columns."""
    cfg, tma = context.cfg, context.tma("grad")
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if work.steps > 0:
        consume(ends.mma_compute_D).wait()
    first = 0
    for columns in cfg.d_parts:
        width = columns // HALVES
        for i_half in cutlass.range_constexpr(HALVES):
            if half_of_warp() == i_half:
                for column in cutlass.range_constexpr(i_half * width, (i_half + 1) * width, CHUNK):
                    stage_chunk(context, work, first, columns, column, scale)
        first += columns
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=context.gradient_staged, number_of_threads=HALVES * LANES)
    if warp == 0:
        matrix = sequence_matrix(tma.tensor, work.own_head, work.batch, rows, cfg.varlen, cfg.lengths_vary)
        tma_store(tma, matrix, work.own_block, context.smem.pointer("leftS", cfg.dtype))


@cute.jit
def stage_chunk(
    context: Sm100WideContext,
    work: WideWork,
    first: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
    column: cutlass.Constexpr[int],
    scale: Float32,
):
    """Stage CHUNK columns of a lane, from `column` of the part of D whose `columns` columns begin at `first`. If a row
    has two lanes, the second has the columns of the part after those of the first."""
    cfg, tile = context.cfg, context.tma("grad").tile
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    panel, in_panel = divmod(cfg.lanes_of_row * first + column, tile.panel_columns)
    if const_expr(cfg.lanes_of_row == 2):
        panel += warp % 4 // 2 * (columns // tile.panel_columns)
    if panel < tile.panels:
        address = context.smem.address("leftS") + panel * tile.panel_bytes
        packed = scaled(context, work, first + column, scale)
        store_row(address, tile, own_row(cfg, 0), in_panel, packed)


@cute.jit
def scaled(context: Sm100WideContext, work: WideWork, column: cutlass.Constexpr[int], scale: Float32) -> list[Int32]:
    """CHUNK columns of D times `scale`, in 16-bit pairs."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    packed = [Int32(0)] * (CHUNK // 2)
    if work.steps > 0:
        x = tmem.load(tmem.lane_address(context.tmem.D, warp) + column, CHUNK)
        tmem.wait_loads()
        for j in cutlass.range_constexpr(0, CHUNK, 2):
            pair = cute.arch.mul_packed_f32x2((x[j], x[j + 1]), (scale, scale))
            packed[j // 2] = pack_half(pair[0], pair[1], context.cfg.dtype)
    return packed
