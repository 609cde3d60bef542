"""Products of 128 rows of a CTA pair, whose right operands come piece by piece through a ring of equal stages.

Each CTA has 64 rows of the left operand and of D. Lanes 0 to 63 of its tensor memory hold the first half of D's
columns, lanes 64 to 127 the second, so D takes half as many columns as one of 128 rows in each CTA, at the full rate
of the matrix unit. This is how 512 columns of O or of a gradient leave room for scores.

A right operand is read in one of two forms. By panels: its columns are reduced, and a stage has some panels of this
CTA's rows. By rows: its rows are reduced, and a stage has 64 of them, and this CTA's half of up to 256 columns.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..pipeline.cursor import Cursor
from ..pipeline.smem import Tile
from ..pipeline.tma import TmaTile, tma_load, tma_load_panel
from ..runtime.spec import AttentionSpec
from .mma import Major, SmemOperand, Umma

PAIR = 2  # CTAs
CTA_ROWS = 64  # of the left operand in a CTA; also the rows of a stage by rows
PANEL_COLUMNS = 64
STAGE_BYTES = 16 << 10
_MOST_COLUMNS = 256  # of a product
_WIDE = 256  # columns of O or a gradient for which tensor memory has room in one lane a row, beside scores

Pieces = list[tuple[cute.Tensor, Int32]]  # matrix and tile index of each piece of a tile, see `Keys.pieces_of`


def is_widest(spec: AttentionSpec) -> bool:
    """Whether the kernels of a problem work with such products."""
    return max(spec.head_dim, spec.head_dim_v) > _WIDE


def panels_of_stages(tile: Tile) -> list[slice]:
    """Panels of a right operand in each stage, by panels."""
    per_stage = STAGE_BYTES // tile.panel_bytes
    return [slice(first, min(first + per_stage, tile.panels)) for first in range(0, tile.panels, per_stage)]


def column_parts(columns: int) -> list[int]:
    """Columns of each product that has a right operand by rows: in each CTA whole panels, so the last is padded."""
    padded = -(-columns // (PAIR * PANEL_COLUMNS)) * PAIR * PANEL_COLUMNS
    return [min(_MOST_COLUMNS, padded - first) for first in range(0, padded, _MOST_COLUMNS)]


def d_columns(columns: int) -> int:
    """Tensor-memory columns of a D with this many columns."""
    return sum(column_parts(columns)) // 2


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
        first_panel = 0
        for columns in column_parts(tma.tile.columns):
            panels = columns // PAIR // PANEL_COLUMNS
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
            first_panel += PAIR * panels
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
