"""Tiles of the loops: sizes, loads from views and stores to views."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# The fastest on a CPU core among tiles of 64 to 512 by 256 to 512 (1 x 8 x 2048 x 64, forward and backward).
TILE_M = 256
TILE_N = 512
TILE_SCORES = 1 << 19


def tiles_of(rows: range, size: int) -> Iterator[range]:
    for first in range(rows.start, rows.stop, size):
        yield range(first, min(first + size, rows.stop))


def load_q(view: Tensor, rows: range, dtype: torch.dtype) -> Tensor:
    """Load a tile of a q view as (heads, group * rows, dim)."""
    tile = view[:, rows.start : rows.stop].permute(0, 2, 3, 1, 4).to(dtype)
    return tile.reshape(tile.shape[0] * tile.shape[1], tile.shape[2] * tile.shape[3], tile.shape[4])


def load_k(view: Tensor, rows: range, dtype: torch.dtype) -> Tensor:
    """Load a tile of a k view as (heads, rows, dim)."""
    tile = view[:, rows.start : rows.stop].transpose(1, 2).to(dtype)
    return tile.reshape(tile.shape[0] * tile.shape[1], tile.shape[2], tile.shape[3])


def load_rows(view: Tensor, rows: range) -> Tensor:
    """Load a tile of a row view as (heads, group * rows, 1)."""
    tile = view[..., rows.start : rows.stop]
    return tile.reshape(tile.shape[0] * tile.shape[1], tile.shape[2] * tile.shape[3], 1)


def store_q(view: Tensor, rows: range, tile: Tensor) -> None:
    target = view[:, rows.start : rows.stop].permute(0, 2, 3, 1, 4)
    target.copy_(tile.view(target.shape))


def store_k(view: Tensor, rows: range, tile: Tensor) -> None:
    target = view[:, rows.start : rows.stop].transpose(1, 2)
    target.copy_(tile.view(target.shape))


def store_rows(view: Tensor, rows: range, tile: Tensor) -> None:
    target = view[..., rows.start : rows.stop]
    target.copy_(tile.view(target.shape))
