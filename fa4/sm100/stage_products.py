"""Loads and products of operands that come through a ring of stages, see `stages`."""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..pipeline.cursor import Cursor
from ..pipeline.smem import Tile
from ..pipeline.tma import TmaTile, tma_load, tma_load_panel
from .mma import Major, SmemOperand, Umma
from .stages import CTA_ROWS, PAIR, PANEL_COLUMNS, STAGE_BYTES, column_parts, panels_by_rows, panels_of_stages

Pieces = list[tuple[cute.Tensor, Int32]]  # matrix and tile index of each piece of a tile, see `Keys.pieces_of`


def load_by_panels(tma: TmaTile, pieces: Pieces, ring: cute.Pointer, cursor: Cursor, rank: Int32) -> Cursor:
    """Load this CTA's rows of a right operand. Returns the cursor after it."""
    for panels in panels_of_stages(tma.tile):
        cursor.wait()
        cursor.expect_tx((panels.stop - panels.start) * tma.tile.panel_bytes, rank)
        first = ring + (cursor.stage * (STAGE_BYTES // 2) - panels.start * (tma.tile.panel_bytes // 2))
        for i, (x, tile) in enumerate(pieces):
            tma_load(tma, x, tile, first, cursor.barrier(), i, panels)
        cursor = cursor.next()
    return cursor


def load_by_rows(tma: TmaTile, groups: list[Pieces], ring: cute.Pointer, cursor: Cursor, rank: Int32) -> Cursor:
    """Load this CTA's columns of a right operand, in groups of 64 rows. Returns the cursor after it."""
    for pieces in groups:
        for first_panel, panels in panels_by_rows(tma.tile.columns):
            cursor.wait()
            cursor.expect_tx(panels * tma.tile.panel_bytes, rank)
            stage = ring + cursor.stage * (STAGE_BYTES // 2)
            for i, (x, tile) in enumerate(pieces):
                for panel in range(panels):
                    # Past the last panel load that one again: a box must not lie wholly outside its tensor.
                    index = cutlass.min(first_panel + rank * panels + panel, tma.tile.panels - 1)
                    to = stage + panel * (tma.tile.panel_bytes // 2)
                    tma_load_panel(tma, x, tile, index, to, cursor.barrier(), i)
            cursor = cursor.next()
    return cursor


def issue_by_panels(
    dtype: type, d: Int32, left: Tile, left_address: Int32, right: Tile, ring: Int32, cursor: Cursor,
    done: Callable[[], None],
) -> Cursor:  # fmt: skip
    """Issue D = left right^T. done: commits, called by one thread. Returns the cursor after the right operand."""
    a, b = (SmemOperand(Tile(tile.rows, PANEL_COLUMNS), Major.K) for tile in (left, right))
    umma = Umma(dtype, n=PAIR * right.rows, k=PANEL_COLUMNS, b=b, a=a, m=PAIR * left.rows, ctas=PAIR)
    stages, low = panels_of_stages(right), a.at(left_address)
    for panels in stages:
        cursor.wait()
        stage = b.at(ring + cursor.stage * STAGE_BYTES)
        with cute.arch.elect_one():
            for panel in range(panels.start, panels.stop):
                in_stage = panel - panels.start
                a_low, b_low = low + (panel * left.panel_bytes >> 4), stage + (in_stage * right.panel_bytes >> 4)
                umma.issue(d, a_low, b_low, panel > 0)
            cursor.commit()
            if panels == stages[-1]:
                done()
        cursor = cursor.next()
    return cursor


def issue_by_rows(
    dtype: type, d: Int32, left: Tile, left_address: Int32, columns: int, ring: Int32, cursor: Cursor,
    accumulate: Boolean,
) -> Cursor:  # fmt: skip
    """Issue D += left right, with as many rows of the right operand as `left` has columns. accumulate: False
    overwrites D. Returns the cursor after the right operand."""
    a = SmemOperand(Tile(left.rows, PANEL_COLUMNS), Major.K)
    for group in range(left.panels):
        part_d = d
        for part in column_parts(columns):
            b = SmemOperand(Tile(CTA_ROWS, part // PAIR), Major.MN)
            umma = Umma(dtype, n=part, k=CTA_ROWS, b=b, a=a, m=PAIR * left.rows, ctas=PAIR)
            cursor.wait()
            a_low, b_low = a.at(left_address + group * left.panel_bytes), b.at(ring + cursor.stage * STAGE_BYTES)
            with cute.arch.elect_one():
                umma.issue(part_d, a_low, b_low, accumulate if group == 0 else True)
                cursor.commit()
            cursor = cursor.next()
            part_d += part // 2
    return cursor
