"""Epilogue of the compute role: each consumer stores dV and dK of its keys, through the buffers of V and K."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...core.vec_io import bits, store_vec
from ...pipeline.roles import WARPS_PER_WARPGROUP
from ...pipeline.tma import wait_read
from ..wgmma import ROWS
from .common.config import CONSUMERS, WARPGROUP
from .common.epilogue import store, to_smem
from .common.work import Sm90BackwardWork
from .context import Sm90BackwardContext


def stage_gradients(context: Sm90BackwardContext, work: Sm90BackwardWork, consumer) -> None:
    """Whole warpgroup, after both consumers have stored dS of their last step: store dV, and dK if stages can hold it,
    to shared memory. V is not read after this, nor are the stages of Q and dO behind those of the last step."""
    cfg, scale = context.cfg, context.args.scale
    if cfg.parted:
        if cfg.overlaps_last_dq:
            store_sums(context, consumer)
        return
    if cfg.overlaps_last_dq:
        stage_dv(context, consumer)
    if cfg.stages_fit_dk:
        to_smem(
            cfg, context.smem.address("K") + dk_offset(context, work, consumer.index), cfg.dk_tile, consumer.dk, scale
        )


def index_of_cta() -> Int32:
    """Return this CTA's index, as a number that the compiler does not know from before."""
    index = Int32(cute.arch.block_idx()[0])
    return cute.arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[index])


def store_sums(context: Sm90BackwardContext, consumer) -> None:
    """Store dV and dK of a consumer from registers to the sums of this part of the key block. The place is computed
    here anew, because no register is left for it during the steps."""
    cfg, sums = context.cfg, context.args.key_sums
    thread = cute.arch.thread_idx()[0] % WARPGROUP
    first = consumer.index * (ROWS * (cfg.columns_v + cfg.columns)) + 4 * thread
    n_block, head, batch = context.args.order.at(index_of_cta())
    parts = cute.size(sums, mode=[4])
    coord = first, n_block, head // parts, batch, head % parts
    target = sums.iterator + cute.crd2idx(coord, sums.layout)
    values = [x[i] for x in (consumer.dv, consumer.dk) for i in range(cute.size(x))]
    for i in range(0, len(values), 4):
        store_vec(target + i * WARPGROUP, [bits(x) for x in values[i : i + 4]])


def stage_dv(context: Sm90BackwardContext, consumer) -> None:
    cfg, address = context.cfg, context.smem.address("V")
    to_smem(cfg, address + consumer.index * cfg.dv_tile.nbytes, cfg.dv_tile, consumer.dv, Float32(1.0))


def dk_offset(context: Sm90BackwardContext, work: Sm90BackwardWork, consumer: Int32) -> Int32:
    """Return the byte offset from K of a consumer's dK: in a stage of Q (first consumer) or dO (second), or in K."""
    cfg, offsets, steps = context.cfg, context.smem.offsets, work.steps
    if not cfg.stages_fit_dk:
        return consumer * cfg.dk_tile.nbytes
    q = offsets["Q"] - offsets["K"] + steps % cfg.q_stages * cfg.q_tile.nbytes
    do = offsets["dO"] - offsets["K"] + steps % cfg.stages * cfg.do_tile.nbytes
    return Int32(cutlass.select_(consumer == 0, q, do))


@cute.jit
def store_gradients(context: Sm90BackwardContext, work: Sm90BackwardWork, consumer: cutlass.Constexpr):
    """Store dV and dK of a consumer from shared to global memory; zeros if no query sees a key of the block."""
    cfg, index = context.cfg, consumer.index
    if const_expr(not cfg.stages_fit_dk):
        # The last product of the other consumer may still read K (and V).
        cute.arch.barrier(barrier_id=context.last_dq, number_of_threads=CONSUMERS * WARPGROUP)
        if const_expr(not cfg.overlaps_last_dq):
            stage_dv(context, consumer)
        address = context.smem.address("K") + dk_offset(context, work, index)
        to_smem(cfg, address, cfg.dk_tile, consumer.dk, context.args.scale)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=context.gradients_staged + index, number_of_threads=WARPGROUP)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP == 0:
        block = work.n_block * CONSUMERS + index
        store(context, work, "dv", block, context.smem.pointer("V", cfg.dtype) + index * (cfg.dv_tile.nbytes // 2))
        store(context, work, "dk", block, context.smem.pointer("K", cfg.dtype) + dk_offset(context, work, index) // 2)
        wait_read()
