"""Correction role, four warps, a thread per row of each Q tile: keeps O to scale, and normalises it at the end. The
epilogue stores it, or correction itself does where it goes `directly`.

Waits:   softmax_correction_scale.full, softmax_correction_norm.full, mma_correction_O.full, correction_epilogue_O.free
Signals: mma_softmax_S.free (O may be added to), softmax_correction_scale.free,
         softmax_correction_norm.free, correction_epilogue_O.full

O of a tile is complete up to the previous key block when its scale arrives: softmax saw this block's S, which was
committed after that product. At a work tile's first block there is nothing to scale; the arrival says that the
previous work tile's O has been read.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.vec_io import bits, pack_half, store_vec
from ...fwd.rows import is_written, place_of, result
from ...pipeline.cursor import ALL, consume, produce
from ...pipeline.smem import store_row_chunk
from .. import tmem
from .softmax import rows_in_smem
from .work import Queue, row_tile

COLUMNS = 16  # of O in registers at a time; 32 spill


@cute.jit
def correction(context):
    cfg, ends, context = context.cfg, context.ends("correction"), context.placed()
    lane = cute.arch.thread_idx()[0] % cfg.tile_m
    scale_of, norm_of = rows_in_smem(context, "scale"), rows_in_smem(context, "norm")
    scales, norms = consume(ends.softmax_correction_scale, ALL), consume(ends.softmax_correction_norm, ALL)
    products = consume(ends.mma_correction_O, ALL)
    staged = None if cfg.directly else produce(ends.correction_epilogue_O, ALL)

    queue = Queue.first(context, ends)
    while queue.has_tile():
        work = queue.tile()
        if work.count > 0:
            for i in cutlass.range(work.count, unroll=1):
                for tile in cutlass.range_constexpr(cfg.q_tiles):
                    scales.wait(tile)
                    factor = scale_of[tile * cfg.tile_m + lane]
                    shrinks = cute.arch.vote_any_sync(factor < 1.0)
                    scales.arrive(tile)
                    if shrinks and i > 0:
                        rescale(context, tile, factor)
                    ends.mma_softmax_S.arrive_free(tile)
                scales = scales.next()
            for tile in cutlass.range_constexpr(cfg.q_tiles):
                norms.wait(tile)
                norm = norm_of[tile * cfg.tile_m + lane]
                norms.arrive(tile)
                norms.in_step(products).wait(tile)
                if cutlass.const_expr(cfg.directly):
                    out_to_global(context, work, tile, lane, norm)
                else:
                    norms.in_step(staged).wait(tile)
                    out_to_smem(context, tile, lane, norm)
                    staged.arrive(tile)
            tmem.wait_loads()  # before the next work tile's S.free lets O be overwritten
            norms = norms.next()
        elif cutlass.const_expr(not cfg.split):  # nobody reads a part that saw nothing
            for tile in cutlass.range_constexpr(cfg.q_tiles):
                zeros_to_global(context, work, tile, lane)
        queue = queue.next()


def o_address(context, tile: int) -> Int32:
    """This warp's lanes of a Q tile's O."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    return tmem.lane_address(context.tmem.O + tile * context.cfg.o_columns, warp)


@cute.jit
def rescale(context, tile: cutlass.Constexpr[int], factor: Float32):
    """O *= factor, row by row."""
    tmem.fence_after_sync()
    address = o_address(context, tile)
    for column in cutlass.range_constexpr(0, context.cfg.head_dim_v_padded, COLUMNS):
        o = tmem.load(address + column, COLUMNS)
        tmem.wait_loads()
        scaled = []
        for i in cutlass.range_constexpr(0, COLUMNS, 2):
            scaled += cute.arch.mul_packed_f32x2((o[i], o[i + 1]), (factor, factor))
        tmem.store(address + column, [bits(x) for x in scaled])
    tmem.wait_stores()


def normalised(context, tile: int, column: int, norm: Float32) -> list[Int32]:
    """COLUMNS of output from `column`, O times `norm`, as words: two numbers of 16 bits each, or of a part one of 32.

    A register that a load fills waits for its value by itself (PTX ISA 9.7.16.6.4.5); the caller waits for the loads
    before it lets go of O.
    """
    o = tmem.load(o_address(context, tile) + column, COLUMNS)
    words = []
    for i in range(0, COLUMNS, 2):
        pair = cute.arch.mul_packed_f32x2((o[i], o[i + 1]), (norm, norm))
        words += [bits(x) for x in pair] if context.cfg.split else [pack_half(*pair, context.cfg.dtype)]
    if context.cfg.has_seqused_q:  # a row without data may hold anything, NaN included
        words = [Int32(cutlass.select_(norm == 0.0, Int32(0), word)) for word in words]
    return words


@cute.jit
def out_to_smem(context, tile: cutlass.Constexpr[int], lane: Int32, norm: Float32):
    """Normalise O into its staging tile."""
    cfg = context.cfg
    place = context.smem.address("O") + tile * cfg.o_step
    for column in cutlass.range_constexpr(0, cfg.head_dim_v_padded, COLUMNS):
        words = normalised(context, tile, column, norm)
        for chunk in cutlass.range_constexpr(COLUMNS // 8):
            store_row_chunk(place, cfg.o_tile, lane, column + 8 * chunk, words[4 * chunk : 4 * chunk + 4])


@cute.jit
def out_to_global(context, work, tile: cutlass.Constexpr[int], lane: Int32, norm: Float32):
    """Normalise O into the rows of the result."""
    cfg = context.cfg
    row = row_tile(context, work, tile) * cfg.tile_m + lane
    place = result(context, "out", work)
    place = place.iterator + cute.crd2idx((place_of(cfg, row), 0), place.layout)
    per_word = 1 if cfg.split else 2
    for column in cutlass.range_constexpr(0, cfg.head_dim_v_padded, COLUMNS):
        words = normalised(context, tile, column, norm)  # by the whole warp
        if is_written(cfg, work, row):
            exist = min(COLUMNS, cfg.head_dim_v - column) // per_word
            for i in cutlass.range_constexpr(0, exist, 4):
                store_vec(place + (column + i * per_word), words[i : i + 4])


@cute.jit
def zeros_to_global(context, work, tile: cutlass.Constexpr[int], lane: Int32):
    """Out of a tile that sees no key."""
    cfg = context.cfg
    row = row_tile(context, work, tile) * cfg.tile_m + lane
    if is_written(cfg, work, row):
        out = result(context, "out", work)
        place = out.iterator + cute.crd2idx((place_of(cfg, row), 0), out.layout)
        for column in cutlass.range_constexpr(0, cfg.head_dim_v, 8):
            store_vec(place + column, [Int32(0)] * 4)
