"""Row blocks of a sequence in workspaces, where every sequence starts a new block of tile_m rows.

A varlen sequence gets at most one block more than its rows fill. Its first block thus follows from cu_seqlens without a
prefix sum: with f rows before sequence b and n of its own, f // m + b + ceil(n / m) <= (f + n) // m + b + 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..runtime.dsl import cute, cutlass

if TYPE_CHECKING:
    from cutlass import Int32


class Rows(NamedTuple):
    """Rows of a sequence: the first one, as a row of the tensor (0 unless varlen), and their number."""

    first: cutlass.Int32
    count: cutlass.Int32


def clamp_tile(tile: Int32, rows: Rows, size: int) -> Int32:
    """Return `tile`, or the last tile of `size` rows that has some of `rows` if it has none. For loads of unused data.
    TMA fills a box outside a `seq_bounded_tma` matrix with zeros, but accesses the start of the map, which may be an
    invalid address: an H100 faults."""
    return cutlass.min(tile, (rows.count - 1) // size)


def first_row_block(batch: Int32, rows: Rows, extent: Int32, tile_m: int, group: int, varlen: bool) -> Int32:
    """Return the first row block of sequence `batch`. Each of its rows counts `group` times (packed heads).

    Args:
        rows: the sequence's rows in its tensor, including padding rows.
        extent: rows of a dense tensor.
    """
    if varlen:
        return rows.first * group // tile_m + batch
    return batch * cute.ceil_div(extent * group, tile_m)


def row_blocks(rows: int, batch: int, tile_m: int, group: int, varlen: bool) -> int:
    """Host side: return the row blocks of all sequences. rows: rows of a dense sequence, or of all varlen sequences."""
    if varlen:
        return rows * group // tile_m + batch
    return batch * -(-rows * group // tile_m)
