"""Output of a consumer: O, normalised, from accumulators to global memory, by TMA or directly.

`consumer` has `o`, the accumulators of a warp's 16 rows; `first_row`, the first of them; and for TMA `out`, the warp's
staging buffer, and `index`. O leaves through shared memory; each warp stores its own rows.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...core.sequence import sequence_matrix
from ...core.vec_io import bits, pack_half, store_vec
from ...pipeline.fragment import (
    LANES_PER_ROW,
    ROWS_PER_THREAD,
    first_column,
    pack_pairs,
    row_in_warp,
    row_registers,
    store_matrices,
)
from ...pipeline.roles import ROWS_PER_WARP
from ...pipeline.tma import tma_start_store, wait_read
from ..launch import ForwardContext
from ..variant import OutStore
from .ping_pong import CONSUMER_THREADS, FIRST_BARRIER
from .rows import is_written, result, row_coord_of
from .work import Work


def out_to_smem(context: ForwardContext, consumer: Any, norms: list[Float32]) -> None:
    """Store this warp's rows of O, normalised, to the staging buffer at `consumer.out`."""
    cfg: Any = context.cfg
    packed = pack_pairs(consumer.o, norms, cfg.dtype)
    if cfg.has_seqused_q:  # a row without data may hold anything, NaN included
        packed = [Int32(cutlass.select_(norms[i % 2] == 0.0, Int32(0), pair)) for i, pair in enumerate(packed)]
    if cfg.out_store is OutStore.TMA_OVER_Q:  # all warps: the products have read Q
        barrier = FIRST_BARRIER + cfg.consumers + consumer.index  # the barriers before are for ping-pong
        cute.arch.barrier(barrier_id=barrier, number_of_threads=CONSUMER_THREADS)
    else:
        wait_stores_read()
    store_matrices(consumer.out.toint(), cfg.o_tile, packed)
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


def store_out(context: ForwardContext, work: Work, consumer: Any) -> None:
    """Start the TMA store of this warp's staged rows; TMA skips rows and columns outside the tensor."""
    cfg, tma = context.cfg, context.tma("o")
    out = sequence_matrix(tma.tensor, work.head, work.batch, work.query_rows, cfg.varlen, cfg.varlen)
    tma_start_store(tma, out, consumer.first_row(work) // ROWS_PER_WARP, consumer.out)


@cute.jit
def out_to_global(
    context: ForwardContext,
    work: Work,
    consumer: Any,
    norms: list[Float32],
    first: cutlass.Constexpr[int],
    columns: cutlass.Constexpr[int],
):
    """Store this warp's rows of O, normalised, from registers to global memory. consumer: has `o`, the first of whose
    `columns` is column `first` of the output, and `first_row`."""
    cfg, first_row = context.cfg, consumer.first_row(work)
    out = result(context, "out", work)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        row = first_row + row_in_warp(r)
        if is_written(cfg, work, row):
            ptr = out.iterator + cute.crd2idx((row_coord_of(cfg, row), first + first_column()), out.layout)
            indices = row_registers(columns, r)
            for i in cutlass.range_constexpr(0, len(indices), 2):
                pair = [consumer.o[index] * norms[r] for index in indices[i : i + 2]]
                if const_expr(cfg.has_seqused_q):  # a row without data may hold anything, NaN included
                    pair = [Float32(cutlass.select_(norms[r] == 0.0, Float32(0.0), x)) for x in pair]
                packed = [bits(x) for x in pair] if const_expr(cfg.split) else [pack_half(pair[0], pair[1], cfg.dtype)]
                store_vec(ptr + 4 * i, packed)


def wait_stores_read() -> None:
    """Whole warp: wait until its bulk stores have read shared memory."""
    wait_read()
    cute.arch.sync_warp()


@cute.jit
def zeros_to_global(context: ForwardContext, work: Work, consumer: Any):
    """Store zeros as O of rows that see no key."""
    cfg, first_row = context.cfg, consumer.first_row(work)
    out = result(context, "out", work)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        row = first_row + row_in_warp(r)
        if is_written(cfg, work, row):
            ptr = out.iterator + cute.crd2idx((row_coord_of(cfg, row), 0), out.layout)
            for column in cutlass.range(cute.arch.lane_idx() % LANES_PER_ROW * 8, cfg.head_dim_v, 8 * LANES_PER_ROW):
                store_vec(ptr + column, [Int32(0)] * 4)
