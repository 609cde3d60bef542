"""Where the row blocks of a sequence lie in workspaces, in which every sequence starts a new block of tile_m rows.

Packed sequences get one block more than their rows fill at most, so that the place follows from cu_seqlens without a
prefix sum: with f rows before sequence b and n of its own, f // m + b + ceil(n / m) <= (f + n) // m + b + 1.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from .sequence import Rows


def first_row_block(batch: Int32, place: Rows, extent: Int32, tile_m: int, group: int, varlen: bool) -> Int32:
    """The first row block of sequence `batch`, each of whose rows stands `group`-fold (its packed heads).

    Args:
        place: the sequence's rows in its tensor, whether they hold data or not.
        extent: rows of a dense tensor.
    """
    if varlen:
        return place.first * group // tile_m + batch
    return batch * cute.ceil_div(extent * group, tile_m)


def row_blocks(rows: int, batch: int, tile_m: int, group: int, varlen: bool) -> int:
    """Row blocks of all sequences together; on the host. rows: of a dense sequence, or of all packed ones."""
    if varlen:
        return rows * group // tile_m + batch
    return batch * -(-rows * group // tile_m)
