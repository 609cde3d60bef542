"""The end of the compute role: each warpgroup stores dV and dK of its keys, through the places of V and K."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.sequence import sequence_matrix
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.smem import PANEL_ROW_BYTES
from ...pipeline.tma import tma_start_store, wait_read
from ..fragment import ROWS_PER_WARP, store_matrices, to_words
from .config import TEAMS
from .placement import WARPGROUP


@cute.jit
def store_gradients(context, work, dv: cute.Tensor, dk: cute.Tensor, team: Int32):
    """dV and dK from registers to global memory; zeros if no query sees a key of the block."""
    # Both places may still be read by the other warpgroup's last products.
    cute.arch.barrier(barrier_id=context.last_dq, number_of_threads=TEAMS * WARPGROUP)
    stage(context, "V", "dv", dv, team, Float32(1.0))
    stage(context, "K", "dk", dk, team, context.args.scale)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=context.gradients_staged + team, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
        block = work.n_block * TEAMS + team
        store(context, work, "V", "dv", block, team)
        store(context, work, "K", "dk", block, team)
        wait_read()


@cute.jit
def store_gradient(
    context,
    work,
    region: cutlass.Constexpr[str],
    name: cutlass.Constexpr[str],
    gradient: cute.Tensor,
    scale: Float32,
    team: cutlass.Constexpr[int],
):
    """The one gradient that a warpgroup has of a CTA with 64 keys, to its global memory through the place `region`."""
    # What lies there may still be read by the other warpgroup's last products.
    cute.arch.barrier(barrier_id=context.last_dq, number_of_threads=TEAMS * WARPGROUP)
    stage(context, region, name, gradient, 0, scale)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=context.gradients_staged + team, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
        store(context, work, region, name, work.n_block, 0)
        wait_read()


def stage(context, region: str, name: str, gradient: cute.Tensor, team: Int32 | int, scale: Float32) -> None:
    """A warpgroup's accumulator, times `scale`, to its share of `region`."""
    tile = getattr(context.cfg, f"{name}_tile")
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
    own = context.smem.address(region) + team * tile.nbytes + warp * (ROWS_PER_WARP * PANEL_ROW_BYTES)
    store_matrices(own, tile, to_words(gradient, [scale, scale], context.cfg.dtype))


def store(context, work, region: str, name: str, block: Int32, team: Int32 | int) -> None:
    """One warp: start storing a warpgroup's share, which is a block of 64 keys."""
    tma = context.tma(name)
    matrix = sequence_matrix(tma.tensor, work.head_kv, work.batch, work.k, context.cfg.varlen, context.cfg.ragged)
    place = context.smem.pointer(region, context.cfg.dtype) + team * (tma.tile.nbytes // 2)
    tma_start_store(tma, matrix, block, place)
