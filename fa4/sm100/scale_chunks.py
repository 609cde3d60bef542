"""Scales of blocks of 32 numbers as chunks, on the host; see `block_scales`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ..runtime.spec import E8M0_ONE
from .mma import CHUNK_BLOCKS, CHUNK_ROWS


def in_tiles(scales: Tensor, tile: int, cu_seqlens: Tensor | None, step: int = 1) -> Tensor:
    """Cut scales (batch, entries, ...) into tiles (batch, tiles, entries of a tile, ...), padded with 1. Of packed
    sequences, (entries, ...) into (1, tiles, ...). step: rows of an entry, of `tile` rows and `cu_seqlens`."""
    entries = tile // step
    if cu_seqlens is None:
        padding = (0, 0) * (scales.ndim - 2) + (0, -scales.shape[1] % entries)
        return functional.pad(scales, padding, value=E8M0_ONE).unflatten(1, (-1, entries))
    sequences = torch.arange(len(cu_seqlens), device=cu_seqlens.device)
    firsts = cu_seqlens // step + (sequences if step > 1 else 0)
    count = step * scales.shape[0] // tile + len(sequences)
    sequence, tiles = sequences_of(count, cu_seqlens // tile + sequences)
    index = (firsts[sequence] + tiles * entries)[:, None] + torch.arange(entries, device=cu_seqlens.device)
    return scales[index.clamp(max=scales.shape[0] - 1)][None]


def sequences_of(count: int, firsts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequence of each of `count` entries, and its index there. firsts: first entry of each sequence, and
    the end of the last."""
    entries = torch.arange(count, dtype=firsts.dtype, device=firsts.device)
    sequence = (torch.searchsorted(firsts, entries, right=True) - 1).clamp(max=len(firsts) - 2)
    return sequence, entries - firsts[sequence]


def as_chunks(*scales: Tensor) -> Tensor:
    """Return scales (batch, tiles, heads, rows, blocks) as chunks, (batch, heads, tiles, bytes); those of several
    operands one after the other in each tile."""
    return torch.cat([_as_chunks(x) for x in scales], -1)


def _as_chunks(scales: Tensor) -> Tensor:
    padding = 0, -scales.shape[-1] % CHUNK_BLOCKS, 0, CHUNK_ROWS - scales.shape[-2]
    x = functional.pad(scales, padding, value=E8M0_ONE)
    x = x.unflatten(-1, (-1, CHUNK_BLOCKS)).unflatten(-3, (CHUNK_ROWS // 32, 32))
    # batch, tiles, heads, group of 32 rows, row in group, chunk, block
    return x.permute(0, 2, 1, 5, 4, 3, 6).contiguous().flatten(3)
