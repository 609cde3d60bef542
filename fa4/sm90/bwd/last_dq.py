"""dQ of the query blocks to which this CTA's key block adds last (`Sm90BackwardConfig.last_finishes`).

In a window few key blocks add to a query block, so that a finish kernel would take a fourth of the time. Instead a
reduce warp of the last CTA loads the sum of the others to shared memory. The consumers add their own dQ, and stage dq
in the input dtype where dQ of other steps is staged in float32. The reduce warp stores it.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.sequence import sequence_matrix
from ...core.vec_io import load_floats
from ...pipeline.tma import bulk_load, tma_start_store
from .common.config import CONSUMERS, WARPGROUP
from .common.epilogue import to_smem
from .common.work import Sm90BackwardWork, StepCoord
from .context import Sm90BackwardContext
from .dq_cursor import DqCursor


def block_before(work: Sm90BackwardWork, coord: StepCoord) -> Int32:
    """Return the query block of the step before (query head of the group, step)."""
    return Int32(cutlass.select_(coord[1] == work.first, work.stop, coord[1])) - 1


@cute.jit
def start_load_of_sum(
    context: Sm90BackwardContext, reducer: Int32, work: Sm90BackwardWork, i: Int32, head: Int32, m_block: Int32
):
    """Reduce warp of step i, whose semaphore it has waited for: start loading the sum of the other key blocks, if this
    key block adds last and there are others."""
    cfg, dq, loaded = context.cfg, context.ends("reduce").compute_reduce_dQ, context.ends("reduce").reduce_compute_sum
    if m_block < work.finished.shared:
        loaded.expect(reducer, 0)
    else:
        if i > 0:  # a consumer that has staged dQ of the step before has read all sums before
            before = i - 1
            for consumer in cutlass.range_constexpr(CONSUMERS):
                dq.wait_full(before % cfg.reducers * CONSUMERS + consumer, before // cfg.reducers & 1)
        cute.arch.fence_proxy("async.shared", space="cta")
        nbytes = CONSUMERS * cfg.dq_bytes
        loaded.expect(reducer, nbytes)
        source = work.sums(context)[0][None, work.row_block + m_block, head].iterator
        with cute.arch.elect_one():
            bulk_load(source, context.smem.pointer("sum", Float32), nbytes, loaded.full(reducer))


@cute.jit
def stage_dq(
    context: Sm90BackwardContext,
    work: Sm90BackwardWork,
    m_block: Int32,
    consumer: Int32,
    last_dq: DqCursor,
    dq: cute.Tensor,
):
    """Stage the dQ of a step for the reduce warps; where this key block adds last, plus the sum of the others, scaled
    and in the input dtype. last_dq: cursor of the step before."""
    cfg = context.cfg
    if m_block < work.finished.first:
        last_dq.store(context, consumer, [dq])
    else:
        if m_block >= work.finished.shared:
            last_dq.next().wait_sum(context.ends("compute").reduce_compute_sum)
            thread = cute.arch.thread_idx()[0] % WARPGROUP
            own = context.smem.pointer("sum", Float32) + consumer * (cfg.dq_bytes // 4) + 4 * thread
            for i in cutlass.range_constexpr(0, cute.size(dq), 4):
                for j, x in enumerate(load_floats(own + i * WARPGROUP, 4)):
                    dq[i + j] = dq[i + j] + x
        last_dq.wait(consumer)
        to_smem(cfg, context.smem.address("dQ") + consumer * cfg.dq_bytes, cfg.dq_tile, dq, context.args.scale)


def start_store(
    context: Sm90BackwardContext, work: Sm90BackwardWork, head: Int32, m_block: Int32, consumer: int
) -> None:
    """One warp: start the TMA store of a consumer's staged dq, as one bulk group."""
    cfg, tma = context.cfg, context.tma("dq")
    matrix = sequence_matrix(tma.tensor, head, work.batch, work.q, cfg.varlen, cfg.lengths_vary)
    ptr = context.smem.pointer("dQ", cfg.dtype) + consumer * (cfg.dq_bytes // 2)
    tma_start_store(tma, matrix, m_block * CONSUMERS + consumer, ptr)
