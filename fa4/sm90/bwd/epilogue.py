"""The end of the compute role: each warpgroup stores dV and dK of its keys, through the places of V and K."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.sequence import sequence_matrix
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES, Tile
from ...pipeline.tma import tma_start_store, wait_read
from ..fragment import ROWS_PER_WARP, pack_pairs, store_matrices
from .config import CONSUMERS
from .placement import WARPGROUP


def stage_gradients(context, work, consumer) -> None:
    """Whole warpgroup, when both have written dS of their last step: its dV and, if there is a place, dK to shared
    memory. Nobody reads V any more, nor the stages of Q and dO after those of the last step."""
    cfg, scale = context.cfg, context.args.scale
    if cfg.leaves_early:
        stage_dv(context, consumer)
    if cfg.has_place_for_dk:
        stage(cfg, context.smem.address("K") + dk_place(context, work, consumer.index), cfg.dk_tile, consumer.dk, scale)


def stage_dv(context, consumer) -> None:
    cfg, place = context.cfg, context.smem.address("V")
    stage(cfg, place + consumer.index * cfg.dv_tile.nbytes, cfg.dv_tile, consumer.dv, Float32(1.0))


def dk_place(context, work, consumer: Int32) -> Int32:
    """Where a warpgroup's dK goes, in bytes from K: of the two warpgroups, to Q and to dO; or to K."""
    cfg, at, steps = context.cfg, context.smem.offsets, work.steps
    if not cfg.has_place_for_dk:
        return consumer * cfg.dk_tile.nbytes
    q = at["Q"] - at["K"] + steps % cfg.q_stages * cfg.q_tile.nbytes
    do = at["dO"] - at["K"] + steps % cfg.stages * cfg.do_tile.nbytes
    return Int32(cutlass.select_(consumer == 0, q, do))


@cute.jit
def store_gradients(context, work, consumer: cutlass.Constexpr):
    """dV and dK of a warpgroup from shared to global memory; zeros if no query sees a key of the block."""
    cfg, index = context.cfg, consumer.index
    if cutlass.const_expr(not cfg.has_place_for_dk):
        # K (and V) may still be read by the other warpgroup's last product.
        cute.arch.barrier(barrier_id=context.last_dq, number_of_threads=CONSUMERS * WARPGROUP)
        if cutlass.const_expr(not cfg.leaves_early):
            stage_dv(context, consumer)
        own = context.smem.address("K") + dk_place(context, work, index)
        stage(cfg, own, cfg.dk_tile, consumer.dk, context.args.scale)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=context.gradients_staged + index, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
        block = work.n_block * CONSUMERS + index
        store(context, work, "dv", block, context.smem.pointer("V", cfg.dtype) + index * (cfg.dv_tile.nbytes // 2))
        store(context, work, "dk", block, context.smem.pointer("K", cfg.dtype) + dk_place(context, work, index) // 2)
        wait_read()


@cute.jit
def store_gradient(
    context,
    work,
    region: cutlass.Constexpr[str],
    name: cutlass.Constexpr[str],
    gradient: cute.Tensor,
    scale: Float32,
    consumer: cutlass.Constexpr[int],
):
    """The one gradient that a warpgroup has of a CTA with 64 keys, to its global memory through the place `region`."""
    # What lies there may still be read by the other warpgroup's last products.
    cute.arch.barrier(barrier_id=context.last_dq, number_of_threads=CONSUMERS * WARPGROUP)
    cfg, tile = context.cfg, getattr(context.cfg, f"{name}_tile")
    stage(cfg, context.smem.address(region), tile, gradient, scale)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=context.gradients_staged + consumer, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
        store(context, work, name, work.n_block, context.smem.pointer(region, cfg.dtype))
        wait_read()


def stage(cfg, place: Int32, tile: Tile, gradient: cute.Tensor, scale: Float32) -> None:
    """A warpgroup's accumulator, times `scale`, to shared memory."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
    own = place + warp * (ROWS_PER_WARP * PANEL_ROW_BYTES)
    store_matrices(own, tile, pack_pairs(gradient, [scale, scale], cfg.dtype))


def store(context, work, name: str, block: Int32, place: cute.Pointer) -> None:
    """One warp: start storing a warpgroup's gradient, which is a block of 64 keys."""
    tma = context.tma(name)
    matrix = sequence_matrix(tma.tensor, work.head_kv, work.batch, work.k, context.cfg.varlen, context.cfg.lengths_vary)
    tma_start_store(tma, matrix, block, place)
