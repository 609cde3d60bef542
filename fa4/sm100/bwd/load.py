"""Load role, one warp: loads K and V once, and Q, dO and the row statistics in every step.

Each CTA of a pair loads Q, dO and K in two layouts: its rows with all columns, and all rows with its columns.

Waits:   load_mma_{Q,dO}.free; pairs also load_mma_{Qcolumns,dOcolumns}.free
Signals: full of the same channels, load_mma_{K,V}.full, load_compute_rows.full; pairs also load_mma_Kcolumns.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...core.rows import Rows, clamp_tile
from ...core.sequence import sequence_matrix
from ...pipeline.cursor import Cursor, produce
from ...pipeline.tma import bulk_load, tma_load, tma_load_panel
from .block_scales import load_scales
from .config import TILE_N
from .context import Sm100BackwardContext, Sm100StepsContext
from .work import ListPosition, Sm100BackwardWork, next_position, work_tile


@cute.jit
def load(context: Sm100BackwardContext):
    """Issue copies in the order of use, which is also the order in which stages become free."""
    cfg, ends = context.cfg, context.ends("load")
    is_pair = const_expr(cfg.ctas == 2)
    work = work_tile(context)
    q, do, rows = produce(ends.load_mma_Q), produce(ends.load_mma_dO), produce(ends.load_compute_rows)
    if const_expr(is_pair):
        q_columns, do_columns = produce(ends.load_mma_Qcolumns), produce(ends.load_mma_dOcolumns)
    coord, position = (work.head_kv * cfg.group, work.block(work.first)), ListPosition(Int32(0), Int32(0))
    if const_expr(cfg.lists_by_head):
        position = ListPosition.first(context, work)
        coord = position.coord(context, work)
    if work.steps > 0:
        kv_coord = (work.head_kv, work.n_block)
        load_tile(context, produce(ends.load_mma_K), work, "K", kv_coord)
        load_tile(context, q, work, "Q", coord)
        load_statistics(context, rows, work.row_block, coord)
        load_tile(context, produce(ends.load_mma_V), work, "V", kv_coord)
        if const_expr(is_pair):
            load_columns(context, produce(ends.load_mma_Kcolumns), work, "K", kv_coord)
    q, rows = q.next(), rows.next()
    for i in cutlass.range(work.steps, unroll=1):
        if const_expr(cfg.lists_by_head):
            coord = position.coord(context, work)
            position = next_position(context, work, position)
            next_coord = position.coord(context, work)
        else:
            coord, next_coord = work.step(i, cfg.group), work.step(i + 1, cfg.group)
        do.wait()
        load_tile(context, do, work, "dO", coord)
        do = do.next()
        if const_expr(is_pair):
            q_columns.at_iteration_of(do_columns).wait()
            load_columns(context, do_columns, work, "dO", coord)
        if i + 1 < work.steps:
            q.wait()
            load_tile(context, q, work, "Q", next_coord)
        q = q.next()
        if const_expr(is_pair):
            q_columns.wait()
            load_columns(context, q_columns, work, "Q", coord)
            q_columns = q_columns.next()
        if i + 1 < work.steps:
            # The stage is free: the wait for Q above implies that dK of the previous step has freed it.
            load_statistics(context, rows, work.row_block, next_coord)
        rows = rows.next()


def load_tile(
    context: Sm100BackwardContext, cursor: Cursor, work: Sm100BackwardWork, name: str, coord: tuple[Int32, Int32]
) -> None:
    """Load K, V, Q or dO at coord = (head, block); in a pair, this CTA's half of the block."""
    cfg, tma, (head, block), rows = context.cfg, context.tma(name.lower()), coord, rows_of(work, name)
    matrix = sequence_matrix(tma.tensor, head, work.batch, rows, cfg.varlen, cfg.lengths_vary)
    smem_ptr = context.smem.pointer(name, cfg.loaded_dtype) + cursor.stage * cfg.elements(tma.tile.nbytes)
    cursor.expect_tx(tma.tile.nbytes + cfg.scale_bytes(name), work.rank)
    if cfg.has_block_scales:
        load_scales(context, cursor, work, name, coord)
    tile_index = work.own_block if name in ("K", "V") else block * cfg.ctas + work.rank
    if cfg.lengths_vary:
        tile_index = clamp_tile(tile_index, rows, tma.tile.rows)
    tma_load(tma, matrix, tile_index, smem_ptr, cursor.barrier())


def load_columns(
    context: Sm100BackwardContext, cursor: Cursor, work: Sm100BackwardWork, name: str, coord: tuple[Int32, Int32]
) -> None:
    """CTA pair: load this CTA's columns of both CTAs' tiles of K, Q or dO at coord = (head, block)."""
    cfg, tma, (head, block), rows = context.cfg, context.tma(name.lower()), coord, rows_of(work, name)
    matrix = sequence_matrix(tma.tensor, head, work.batch, rows, cfg.varlen, cfg.lengths_vary)
    cursor.expect_tx(2 * tma.tile.panel_bytes, work.rank)
    for i in range(2):
        smem_ptr = context.smem.pointer(f"{name}columns", cfg.loaded_dtype) + i * cfg.elements(tma.tile.panel_bytes)
        tile_index = 2 * block + i
        if cfg.lengths_vary:
            tile_index = clamp_tile(tile_index, rows, tma.tile.rows)
        # 8-bit columns of both CTAs would fit a panel: this CTA's come first in its own.
        columns = cute.domain_offset((0, work.rank * (TILE_N // 2)), matrix)
        tma_load_panel(tma, columns, tile_index, Int32(0), smem_ptr, cursor.barrier())


def rows_of(work: Sm100BackwardWork, name: str) -> Rows:
    return work.k if name in ("K", "V") else work.q


@cute.jit
def load_statistics(context: Sm100StepsContext, cursor: Cursor, row_block: Int32, coord: tuple[Int32, Int32]):
    """Load the row statistics of a step at coord = (head, query block): two floats per query. row_block: of the
    sequence's first query block."""
    cfg, rows = context.cfg, context.args.statistics
    head, m_block = coord
    rows_coord = (0, 0, row_block + m_block, head)
    cursor.expect_tx(cfg.rows_bytes)
    with cute.arch.elect_one():
        target = context.smem.pointer("rows", Float32) + cursor.stage * (cfg.rows_bytes // 4)
        bulk_load(rows.iterator + cute.crd2idx(rows_coord, rows.layout), target, cfg.rows_bytes, cursor.barrier())
