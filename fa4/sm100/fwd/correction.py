"""Correction role, four warps, one thread per row of each Q tile: rescales O, and normalises it at the end. The
epilogue then stores O, or correction itself if `cfg.out_store` is `OutStore.DIRECT`.

Waits:   softmax_correction_scale.full, softmax_correction_norm.full, mma_correction_O.full, correction_epilogue_O.free
Signals: mma_softmax_S.free (O is ready for the next addition), softmax_correction_scale.free,
         softmax_correction_norm.free, correction_epilogue_O.full, mma_correction_O.free

O is complete up to the previous key block when the scale arrives: softmax has waited for this block's S, which mma
committed after that PV product. The first block of a work tile needs no scaling; its arrival signals that O of the
previous work tile has been read. With two S of a Q tile, S comes before that PV product, and correction waits for O.
With P in shared memory, softmax rescales O, and correction only normalises it: it waits for neither scale nor S.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...core.vec_io import bits, pack_half, store_vec
from ...fwd.device.rows import is_written, result, row_coord_of
from ...fwd.device.work import Work
from ...fwd.variant import OutStore
from ...pipeline.cursor import ALL, Lane, consume, produce
from ...pipeline.row_chunks import store_row_chunk
from .. import tmem
from .context import Sm100ForwardContext
from .work import Queue, row_tile, rows_in_smem

COLUMNS = 16  # columns of O in registers at a time; 32 would spill


@cute.jit
def correction(context: Sm100ForwardContext):
    cfg, ends, context = context.cfg, context.ends("correction"), context.with_tmem_addresses()
    lane = cute.arch.thread_idx()[0] % cfg.tile_m
    norm_rows = rows_in_smem(context, "norm")
    if const_expr(not cfg.p_in_smem):
        scale_rows = rows_in_smem(context, "scale")
        lanes = [Lane(tile, cfg.q_tiles) for tile in range(cfg.q_tiles)]
        scales = [consume(ends.softmax_correction_scale, lane) for lane in lanes]
    norms = consume(ends.softmax_correction_norm, ALL)
    products = consume(ends.mma_correction_O, ALL)
    staged = None if const_expr(cfg.out_store is OutStore.DIRECT) else produce(ends.correction_epilogue_O, ALL)

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            if const_expr(not cfg.p_in_smem):
                for i in cutlass.range(work.count, unroll=1):
                    for tile in cutlass.range_constexpr(cfg.q_tiles):
                        scales[tile].wait()
                        factor = scale_rows[scales[tile].stage * cfg.tile_m + lane]
                        must_rescale = cute.arch.vote_any_sync(factor < 1.0)
                        scales[tile].arrive()
                        if i > 0:
                            if const_expr(cfg.s_stages > 1):  # of one Q tile
                                products.wait(tile)
                                products = products.next()
                            if must_rescale:
                                rescale(context, tile, factor, cfg.head_dim_v_padded)
                        ends.mma_softmax_S.arrive_free(scales[tile].stage)
                    scales = [cursor.next() for cursor in scales]
            for tile in cutlass.range_constexpr(cfg.q_tiles):
                norms.wait(tile)
                norm = norm_rows[tile * cfg.tile_m + lane]
                norms.arrive(tile)
                if const_expr(cfg.p_in_smem):
                    products.wait(tile)
                elif const_expr(cfg.s_stages == 1):
                    norms.at_iteration_of(products).wait(tile)
                else:
                    products.wait(tile)
                    products = products.next()
                if const_expr(cfg.out_store is OutStore.DIRECT):
                    out_to_global(context, work, tile, lane, norm)
                else:
                    norms.at_iteration_of(staged).wait(tile)
                    out_to_smem(context, tile, lane, norm)
                    staged.arrive(tile)
                if const_expr(cfg.p_in_smem):
                    tmem.wait_loads()
                    products.arrive(tile)
            if const_expr(cfg.p_in_smem):
                products = products.next()
            else:
                tmem.wait_loads()  # before S.free of the next work tile allows mma to overwrite O
            norms = norms.next()
        elif const_expr(not cfg.split):  # combine ignores parts without keys
            for tile in cutlass.range_constexpr(cfg.q_tiles):
                zeros_to_global(context, work, tile, lane)
        queue = queue.next()


def o_address(context: Any, tile: int | Int32) -> Int32:
    """TMEM address of O of a Q tile, at this warp's first lane."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return tmem.lane_address(context.tmem.O + tile * context.cfg.o_columns, warp)


@cute.jit
def rescale(context: Any, tile: int | Int32, factor: Float32, columns: cutlass.Constexpr[int]):
    """O *= factor, per row, in this many columns of tensor memory."""
    tmem.fence_after_sync()
    address = o_address(context, tile)
    for column in cutlass.range_constexpr(0, columns, COLUMNS):
        o = tmem.load(address + column, COLUMNS)
        tmem.wait_loads()
        scaled = []
        for i in cutlass.range_constexpr(0, COLUMNS, 2):
            scaled += cute.arch.mul_packed_f32x2((o[i], o[i + 1]), (factor, factor))
        tmem.store(address + column, [bits(x) for x in scaled])
    tmem.wait_stores()


@cute.jit
def rescale_if_any(
    context: Any,
    tile: int | Int32,
    factor: Float32,
    must_rescale: Boolean,
    columns: cutlass.Constexpr[int],
):
    """Rescale O if any row of the warp must."""
    if cute.arch.vote_any_sync(must_rescale):
        rescale(context, tile, factor, columns)


def normalised(context: Any, tile: int, column: int, norm: Float32) -> list[Int32]:
    """COLUMNS columns of O times `norm` from `column`, in 32-bit registers: 16-bit pairs, or float32 for split-KV.

    A register that tcgen05.ld fills is interlocked (PTX ISA 9.7.16.6.4.5). The caller waits for the loads before it
    releases O.
    """
    o = tmem.load(o_address(context, tile) + column, COLUMNS)
    packed = []
    for i in range(0, COLUMNS, 2):
        pair = cute.arch.mul_packed_f32x2((o[i], o[i + 1]), (norm, norm))
        packed += [bits(x) for x in pair] if context.cfg.split else [pack_half(pair[0], pair[1], context.cfg.dtype)]
    if context.cfg.has_seqused_q:  # an unused row may hold anything, also NaN
        packed = [Int32(cutlass.select_(norm == 0.0, Int32(0), word)) for word in packed]
    return packed


@cute.jit
def out_to_smem(context: Sm100ForwardContext, tile: cutlass.Constexpr[int], lane: Int32, norm: Float32):
    """Write normalised O to its staging tile in shared memory."""
    cfg = context.cfg
    smem_ptr = context.smem.address("O") + tile * cfg.o_step
    for column in cutlass.range_constexpr(0, cfg.head_dim_v_padded, COLUMNS):
        packed = normalised(context, tile, column, norm)
        for chunk in cutlass.range_constexpr(COLUMNS // 8):
            store_row_chunk(smem_ptr, cfg.o_tile, lane, column + 8 * chunk, packed[4 * chunk : 4 * chunk + 4])


@cute.jit
def out_to_global(context: Sm100ForwardContext, work: Work, tile: cutlass.Constexpr[int], lane: Int32, norm: Float32):
    """Write normalised O to global memory."""
    cfg = context.cfg
    row = row_tile(context, work, tile) * cfg.tile_m + lane
    ptr = result(context, "out", work)
    ptr = ptr.iterator + cute.crd2idx((row_coord_of(cfg, row), 0), ptr.layout)
    columns_per_reg = 1 if const_expr(cfg.split) else 2
    for column in cutlass.range_constexpr(0, cfg.head_dim_v_padded, COLUMNS):
        packed = normalised(context, tile, column, norm)  # whole warp
        if is_written(cfg, work, row):
            count = min(COLUMNS, cfg.head_dim_v - column) // columns_per_reg
            for i in cutlass.range_constexpr(0, count, 4):
                store_vec(ptr + (column + i * columns_per_reg), packed[i : i + 4])


@cute.jit
def zeros_to_global(context: Sm100ForwardContext, work: Work, tile: cutlass.Constexpr[int], lane: Int32):
    """Write zeros: O of a tile that sees no key."""
    cfg = context.cfg
    row = row_tile(context, work, tile) * cfg.tile_m + lane
    if is_written(cfg, work, row):
        out = result(context, "out", work)
        ptr = out.iterator + cute.crd2idx((row_coord_of(cfg, row), 0), out.layout)
        for column in cutlass.range_constexpr(0, cfg.head_dim_v, 8):
            store_vec(ptr + column, [Int32(0)] * 4)
