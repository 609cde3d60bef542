"""Roles add_dV and add_dK, one warp each: add the rows of a block's dV or dK to the sums of their keys, by bulk copies.
Deterministic: store them to rows of the list's own. add_dV also chooses the block that a CTA starts with.

Waits:   dV_add_dV.full, dK_add_dK.full, add_dV_all_start.full
Signals: dV_add_dV.free, dK_add_dK.free, add_dV_all_start.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...bwd.device.list_work import SparseWork, work_tile
from ...fwd.device.key_rows import prefetch
from ...pipeline.cursor import Cursor, consume, produce
from ...pipeline.roles import WARP
from ...pipeline.tma import bulk_add, bulk_store
from .config import TILE_N
from .context import Sm90SparseContext
from .front import advance, first_block, load_front, start_block, start_slot

_ROWS = TILE_N // WARP  # of a thread


@cute.jit
def add_dv(context: Sm90SparseContext):
    ends, work, start, front = context.ends("add_dV"), work_tile(context), Int32(0), Int32(0)
    if const_expr(context.cfg.has_front):
        front = load_front(context)
        start = first_block(context, work, front)
        if cute.arch.lane_idx() == 0:
            start_slot(context)[0] = start
        produce(ends.add_dV_all_start).arrive()
    columns, staged = context.cfg.head_dim_v, consume(ends.dV_add_dV)
    add_blocks(context, work, start, "dV", columns, context.args.tensors.dv, staged, front)


@cute.jit
def add_dk(context: Sm90SparseContext):
    ends, work = context.ends("add_dK"), work_tile(context)
    start, columns, staged = start_block(context, ends), context.cfg.head_dim, consume(ends.dK_add_dK)
    add_blocks(context, work, start, "dK", columns, context.args.tensors.dk, staged, None)


@cute.jit
def add_blocks(
    context: Sm90SparseContext,
    work: SparseWork,
    start: Int32,
    region: cutlass.Constexpr[str],
    columns: cutlass.Constexpr[int],
    target: cute.Tensor,
    staged: Cursor,
    front: Int32 | None,
):
    for n in cutlass.range(work.blocks(context), unroll=1):
        block = work.block(context, start, n)
        keys = [block * TILE_N + i * WARP + cute.arch.lane_idx() for i in range(_ROWS)]
        rows = [work.target_row(context, key) for key in keys]
        if const_expr(context.cfg.has_front):
            prefetch_sums(context, work, work.block(context, start, n + 1), columns, target)
            if const_expr(front is not None):
                advance(context, front, rows[0])
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


def prefetch_sums(
    context: Sm90SparseContext, work: SparseWork, block: Int32, columns: int, target: cute.Tensor
) -> None:
    """Bring the rows of a block's sums to the L2 cache; an addition to a row that is not there takes longer. Past the
    end of the list, its last row."""
    for i in range(_ROWS):
        row = work.key_row(context, block * TILE_N + i * WARP + cute.arch.lane_idx())
        prefetch(target.iterator + cute.crd2idx((row, work.head, 0), target.layout), 4 * columns)


def add_row(
    context: Sm90SparseContext, work: SparseWork, region: str, columns: int, target: cute.Tensor, i: int, row: Int32
) -> None:
    """One thread: start to add its i-th row of a block to a row of the target, or to store it there."""
    stride = context.cfg.sum_row_bytes(columns) // 4
    source = context.smem.pointer(region, Float32) + (i * WARP + cute.arch.lane_idx()) * stride
    copy = bulk_store if context.cfg.deterministic else bulk_add
    copy(source, target.iterator + cute.crd2idx((row, work.head, 0), target.layout), 4 * columns)
