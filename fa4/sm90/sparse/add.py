"""Roles add_dV and add_dK, one warp each: add the rows of a block's dV or dK to the sums of their keys, by bulk copies.
Deterministic: store them to rows of the list's own.

Waits:   dV_add_dV.full, dK_add_dK.full
Signals: dV_add_dV.free, dK_add_dK.free
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...bwd.device.list_work import SparseWork, work_tile
from ...pipeline.cursor import Cursor, consume
from ...pipeline.roles import WARP
from ...pipeline.tma import bulk_add, bulk_store
from .config import TILE_N
from .context import Sm90SparseContext

_ROWS = TILE_N // WARP  # of a thread


@cute.jit
def add_dv(context: Sm90SparseContext):
    add_blocks(
        context, "dV", context.cfg.head_dim_v, context.args.tensors.dv, consume(context.ends("add_dV").dV_add_dV)
    )


@cute.jit
def add_dk(context: Sm90SparseContext):
    add_blocks(context, "dK", context.cfg.head_dim, context.args.tensors.dk, consume(context.ends("add_dK").dK_add_dK))


@cute.jit
def add_blocks(
    context: Sm90SparseContext,
    region: cutlass.Constexpr[str],
    columns: cutlass.Constexpr[int],
    target: cute.Tensor,
    staged: Cursor,
):
    work = work_tile(context)
    for block in cutlass.range(work.blocks(context), unroll=1):
        keys = [block * TILE_N + i * WARP + cute.arch.lane_idx() for i in range(_ROWS)]
        rows = [work.target_row(context, key) for key in keys]
        staged.wait()
        cute.arch.fence_proxy("async.shared", space="cta")
        for i in cutlass.range_constexpr(_ROWS):
            if keys[i] < work.count:
                add_row(context, work, region, columns, target, i, rows[i])
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()  # every lane's copies have read the block
        staged.arrive()
        staged = staged.next()


def add_row(
    context: Sm90SparseContext, work: SparseWork, region: str, columns: int, target: cute.Tensor, i: int, row: Int32
) -> None:
    """One thread: start to add its i-th row of a block to a row of the target, or to store it there."""
    stride = context.cfg.sum_row_bytes(columns) // 4
    source = context.smem.pointer(region, Float32) + (i * WARP + cute.arch.lane_idx()) * stride
    copy = bulk_store if context.cfg.deterministic else bulk_add
    copy(source, target.iterator + cute.crd2idx((row, work.head, 0), target.layout), 4 * columns)
