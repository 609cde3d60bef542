"""Rows of a work tile, host side: the padding of packed heads. Device side: `fwd.device.rows`."""

from __future__ import annotations


def padded_heads_of(packed: int) -> int:
    """Tile rows per query with pack_gqa: the number of packed heads, padded to a power of two."""
    return 1 << (packed - 1).bit_length()
