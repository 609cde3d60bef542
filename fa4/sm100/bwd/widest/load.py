"""Load role, one warp: loads the left operands once, and the right operands and the row statistics in every step.

Each CTA of the pair loads its rows of the right operands of S and dP, and its columns of the right operand of D.

Waits:   load_mma_right.free, load_compute_rows.free
Signals: load_mma_{leftS,leftdP,right}.full, load_compute_rows.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ....pipeline.cursor import Cursor, produce
from ...stage_products import load_by_panels, load_by_rows
from ...stages import PAIR
from ..load import load_statistics
from ..wide.load import load_tile, own_rows, piece_of
from ..wide.work import StepBlocks, WideWork, work_tile
from .context import Sm100WidestContext


@cute.jit
def load(context: Sm100WidestContext):
    """Issue copies in the order of the products."""
    cfg, ends, work = context.cfg, context.ends("load"), work_tile(context)
    (left, left_dp), (right, right_dp), columns = cfg.gradient.value
    operands = produce(ends.load_mma_right)
    if const_expr(cfg.gradient.owns_keys):
        rows = produce(ends.load_compute_rows)
    if work.steps > 0:
        here = StepBlocks.first(context, work)
        coord = here.coord(context, work)
        own = work.own_head, work.own_block
        load_tile(context, produce(ends.load_mma_leftS), work, left, own, "leftS")
        operands = load_rows(context, operands, work, right, coord)
        if const_expr(cfg.gradient.owns_keys):
            load_statistics(context, rows, work.row_block, coord)
            rows = rows.next()
        if const_expr(cfg.gradient.needs_dp):
            load_tile(context, produce(ends.load_mma_leftdP), work, left_dp, own, "leftdP")
        for i in cutlass.range(work.steps, unroll=1):
            following = here.next(context, work)
            next_coord = following.coord(context, work)
            if const_expr(cfg.gradient.needs_dp):
                operands = load_rows(context, operands, work, right_dp, coord)
            if i + 1 < work.steps:
                operands = load_rows(context, operands, work, right, next_coord)
            operands = load_columns(context, operands, work, columns, coord)
            if const_expr(cfg.gradient.owns_keys):
                if i + 1 < work.steps:
                    rows.wait()
                    load_statistics(context, rows, work.row_block, next_coord)
                rows = rows.next()
            here, coord = following, next_coord


def load_rows(
    context: Sm100WidestContext, cursor: Cursor, work: WideWork, name: str, coord: tuple[Int32, Int32]
) -> Cursor:
    """Load this CTA's rows of a step at coord = (head, block). Returns the cursor after them."""
    pieces = [piece_of(context, work, name, *own_rows(context, work, coord))]
    return load_by_panels(context.tma(name), pieces, ring(context), cursor, work.rank)


def load_columns(
    context: Sm100WidestContext, cursor: Cursor, work: WideWork, name: str, coord: tuple[Int32, Int32]
) -> Cursor:
    """Load this CTA's columns of all rows of a step. Returns the cursor after them."""
    head, block = coord
    groups = [[piece_of(context, work, name, head, PAIR * block + i)] for i in range(PAIR)]
    return load_by_rows(context.tma(name), groups, ring(context), cursor, work.rank)


def ring(context: Sm100WidestContext) -> cute.Pointer:
    return context.smem.pointer("right", context.cfg.dtype)
