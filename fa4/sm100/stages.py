"""Products of 128 rows of a CTA pair, whose right operands come piece by piece through a ring of equal stages.

Each CTA has 64 rows of the left operand and of D. Lanes 0 to 63 of its tensor memory hold the first half of D's
columns, lanes 64 to 127 the second, so D takes half as many columns as one of 128 rows in each CTA, at the full rate
of the matrix unit. This is how 512 columns of O or of a gradient leave room for scores.

A right operand is read in one of two forms. By panels: its columns are reduced, and a stage has some panels of this
CTA's rows. By rows: its rows are reduced, and a stage has 64 of them, and this CTA's half of up to 256 columns.
"""

from __future__ import annotations

from ..pipeline.smem import Tile
from ..runtime.spec import AttentionSpec

PAIR = 2  # CTAs
CTA_ROWS = 64  # of the left operand in a CTA; also the rows of a stage by rows
PANEL_COLUMNS = 64
STAGE_BYTES = 16 << 10
_MOST_COLUMNS = 256  # of a product
_WIDE = 256  # columns of O or a gradient for which tensor memory has room in one lane a row, beside scores


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


def panels_by_rows(columns: int) -> list[tuple[int, int]]:
    """(first panel, panels in each CTA) of each stage of a group of rows, by rows. CTA r has those from the first one
    plus r times their number on."""
    counts = [part // PAIR // PANEL_COLUMNS for part in column_parts(columns)]
    return [(PAIR * sum(counts[:i]), count) for i, count in enumerate(counts)]


def d_columns(columns: int) -> int:
    """Tensor-memory columns of a D with this many columns."""
    return sum(column_parts(columns)) // 2
