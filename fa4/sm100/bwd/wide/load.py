"""Load role, one warp: loads the left operands once, and the right operands and the row statistics in every step.

Each CTA of a pair loads its rows of the right operands of S and dP, and its columns of the right operand of D.

Waits:   load_mma_{rightS,rightdP,rightD}.free, load_compute_rows.free
Signals: full of the same channels, load_mma_{leftS,leftdP}.full, load_compute_rows.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ....core.rows import clamp_tile
from ....core.sequence import sequence_matrix
from ....pipeline.cursor import Cursor, produce
from ....pipeline.tma import tma_load, tma_load_panel
from ..load import load_statistics
from .context import Sm100WideContext
from .work import StepBlocks, WideWork, work_tile


@cute.jit
def load(context: Sm100WideContext):
    """Issue copies in the order in which the matrix unit frees stages."""
    cfg, ends, work = context.cfg, context.ends("load"), work_tile(context)
    (left, left_dp), (right, right_dp), columns = cfg.gradient.value
    operands, gradient_operands = produce(ends.load_mma_rightS), produce(ends.load_mma_rightD)
    if const_expr(cfg.gradient.needs_dp):
        dp_operands = produce(ends.load_mma_rightdP)
    if const_expr(cfg.gradient.owns_keys):
        rows = produce(ends.load_compute_rows)
    if work.steps > 0:
        here = StepBlocks.first(context, work)
        coord = here.coord(context, work)
        own = work.own_head, work.own_block
        load_tile(context, produce(ends.load_mma_leftS), work, left, own, "leftS")
        load_tile(context, operands, work, right, own_rows(context, work, coord), "rightS")
        if const_expr(cfg.gradient.owns_keys):
            load_statistics(context, rows, work.row_block, coord)
            rows = rows.next()
        if const_expr(cfg.gradient.needs_dp):
            load_tile(context, produce(ends.load_mma_leftdP), work, left_dp, own, "leftdP")
        operands = operands.next()
        for i in cutlass.range(work.steps, unroll=1):
            following = here.next(context, work)
            next_coord = following.coord(context, work)
            if const_expr(cfg.gradient.needs_dp):
                dp_operands.wait()
                load_tile(context, dp_operands, work, right_dp, own_rows(context, work, coord), "rightdP")
                dp_operands = dp_operands.next()
            if i + 1 < work.steps:
                operands.wait()
                load_tile(context, operands, work, right, own_rows(context, work, next_coord), "rightS")
            operands = operands.next()
            gradient_operands.wait()
            load_columns(context, gradient_operands, work, columns, coord)
            gradient_operands = gradient_operands.next()
            if const_expr(cfg.gradient.owns_keys):
                if i + 1 < work.steps:
                    rows.wait()
                    load_statistics(context, rows, work.row_block, next_coord)
                rows = rows.next()
            here, coord = following, next_coord


def own_rows(context: Sm100WideContext, work: WideWork, coord: tuple[Int32, Int32]) -> tuple[Int32, Int32]:
    """(head, tile) of this CTA's rows of a step at coord = (head, block)."""
    head, block = coord
    return head, block * context.cfg.ctas + work.rank


def matrix_of(context: Sm100WideContext, work: WideWork, name: str, head: Int32):
    """Matrix of the TMA map `name`, with its rows."""
    cfg, rows = context.cfg, work.k if name in ("k", "v") else work.q
    return sequence_matrix(context.tma(name).tensor, head, work.batch, rows, cfg.varlen, cfg.lengths_vary), rows


def piece_of(context: Sm100WideContext, work: WideWork, name: str, head: Int32, tile: Int32):
    """(matrix, tile index) of a tile of the TMA map `name`, for a load."""
    matrix, rows = matrix_of(context, work, name, head)
    if context.cfg.lengths_vary:
        tile = clamp_tile(tile, rows, context.tma(name).tile.rows)
    return matrix, tile


def load_tile(
    context: Sm100WideContext, cursor: Cursor, work: WideWork, name: str, coord: tuple[Int32, Int32], region: str
) -> None:
    """Load the tile at coord = (head, tile) of the TMA map `name`."""
    cfg, tma = context.cfg, context.tma(name)
    matrix, tile_index = piece_of(context, work, name, *coord)
    cursor.expect_tx(tma.tile.nbytes, work.rank)
    smem_ptr = context.smem.pointer(region, cfg.dtype) + cursor.stage * cfg.elements(tma.tile.nbytes)
    tma_load(tma, matrix, tile_index, smem_ptr, cursor.barrier())


def load_columns(
    context: Sm100WideContext, cursor: Cursor, work: WideWork, name: str, coord: tuple[Int32, Int32]
) -> None:
    """Load this CTA's columns of all rows of a step at coord = (head, block): panel by panel, the rows of one CTA
    after those of the other."""
    cfg, tma, (head, block), tile = context.cfg, context.tma(name), coord, context.cfg.columns_tile
    cursor.expect_tx(tile.nbytes, work.rank)
    stage_ptr = context.smem.pointer("rightD", cfg.dtype) + cursor.stage * cfg.elements(tile.nbytes)
    for i in range(cfg.ctas):
        matrix, tile_index = piece_of(context, work, name, head, cfg.ctas * block + i)
        for panel in range(tile.panels):
            smem_ptr = stage_ptr + cfg.elements(panel * tile.panel_bytes + i * tma.tile.panel_bytes)
            # Past the last panel load that one again: a box must not lie wholly outside its tensor.
            index = cutlass.min(work.rank * tile.panels + panel, tma.tile.panels - 1)
            tma_load_panel(tma, matrix, tile_index, index, smem_ptr, cursor.barrier())
