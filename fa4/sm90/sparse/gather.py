"""Gather role: copies Q and dO once, then the listed rows of K and V, block by block.

Waits:   add_dV_all_start.full, gather_both_K.free, gather_scores_V.free
Signals: gather_both_Q.full, gather_both_K.full, gather_scores_V.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ...bwd.device.list_work import SparseWork, work_tile
from ...fwd.device.key_rows import copy_row
from ...pipeline.cursor import produce
from ...pipeline.roles import WARP
from ...pipeline.smem import PANEL_ROW_BYTES, Tile
from .config import GATHERERS, TILE_N
from .context import Sm90SparseContext
from .front import start_block

_LANES = PANEL_ROW_BYTES // 16  # lanes that copy the part of a row in one panel
_ROWS = GATHERERS * WARP // _LANES  # rows at a time


@cute.jit
def gather(context: Sm90SparseContext):
    ends, cfg, t = context.ends("gather"), context.cfg, context.args.tensors
    q, k, v = produce(ends.gather_both_Q), produce(ends.gather_both_K), produce(ends.gather_scores_V)
    work = work_tile(context)
    if work.count > 0:
        copy_queries(context, work, "Q", cfg.q_tile, t.q)
        start = start_block(context, ends)
        rows = block_rows(context, work, start)
        copy_queries(context, work, "dO", cfg.do_tile, t.dout)
        cute.arch.cp_async_commit_group()
        for i in cutlass.range(work.blocks(context), unroll=1):
            block = work.block(context, start, i)
            k.wait()
            copy_keys(
                context, work, block, rows, t.k, cfg.k_tile, context.smem.address("K") + k.stage * cfg.k_tile.nbytes
            )
            cute.arch.cp_async_commit_group()
            v.wait()
            copy_keys(
                context, work, block, rows, t.v, cfg.v_tile, context.smem.address("V") + v.stage * cfg.v_tile.nbytes
            )
            cute.arch.cp_async_commit_group()
            load_rows(context, work, work.block(context, start, i + 1), rows)
            if i == 0:
                cute.arch.cp_async_wait_group(2)
                q.arrive()
            cute.arch.cp_async_wait_group(1)
            k.arrive()
            cute.arch.cp_async_wait_group(0)
            v.arrive()
            k, v = k.next(), v.next()


def tile_row(i: int) -> Int32:
    """Return the i-th row of a tile that this thread copies."""
    return i * _ROWS + cute.arch.thread_idx()[0] % (GATHERERS * WARP) // _LANES


def block_rows(context: Sm90SparseContext, work: SparseWork, block: Int32) -> cute.Tensor:
    """Return the rows of k and v that this thread copies of a block, in registers."""
    rows = cute.make_rmem_tensor(TILE_N // _ROWS, Int32)
    load_rows(context, work, block, rows)
    return rows


def load_rows(context: Sm90SparseContext, work: SparseWork, block: Int32, rows: cute.Tensor) -> None:
    for i in range(TILE_N // _ROWS):
        rows[i] = work.key_row(context, block * TILE_N + tile_row(i))


def copy_keys(
    context: Sm90SparseContext,
    work: SparseWork,
    block: Int32,
    rows: cute.Tensor,
    x: cute.Tensor,
    tile: Tile,
    address: Int32,
) -> None:
    """Start to copy a block of k or v; rows past the end of the list become zeros."""
    for i in range(TILE_N // _ROWS):
        row = tile_row(i)
        source = x.iterator + cute.crd2idx((rows[i], work.head, 0), x.layout)
        copy_row(source, Boolean(block * TILE_N + row < work.count), tile, address, row)


def copy_queries(context: Sm90SparseContext, work: SparseWork, name: str, tile: Tile, x: cute.Tensor) -> None:
    """Start to copy the tile of q or dout; rows past the last query head become zeros."""
    matrix, last = work.matrix(x), context.cfg.group - 1
    for i in range(tile.rows // _ROWS):
        row = tile_row(i)
        index = work.first + row
        source = matrix.iterator + cute.crd2idx((cutlass.min(index, last), 0), matrix.layout)
        copy_row(source, Boolean(index <= last), tile, context.smem.address(name), row)
