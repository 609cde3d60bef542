"""Scales of blocks of 32 numbers: their layout, and their way to tensor memory, where products read them.

A chunk has the scales of up to 128 rows of an operand (rows of Q, keys of K, columns of V) and of four blocks along the
reduction: 512 bytes, that of block b of row r at byte 16 (r % 32) + 4 (r // 32) + b. An operand with more blocks has
several chunks. The host lays out scales in chunks, those of a tile one after the other; kernels load them in bulk.
"""

from __future__ import annotations

import cutlass.cute as cute
import torch
from cutlass import Int32
from torch import Tensor
from torch.nn import functional

from ..runtime.spec import E8M0_ONE
from . import tmem
from .mma import CHUNK_BLOCKS, CHUNK_BYTES, CHUNK_COLUMNS, CHUNK_ROWS, copy_chunk

_ONES = E8M0_ONE * 0x01010101  # of four blocks


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


def copy_scales(source: cute.Pointer, address: Int32, nbytes: int) -> None:
    """One thread of mma: copy scales from shared to tensor memory. The products that read these columns before are
    complete: the stage of shared memory was free when it was loaded."""
    for chunk in range(nbytes // CHUNK_BYTES):
        copy_chunk(source.toint() + chunk * CHUNK_BYTES, address + chunk * CHUNK_COLUMNS)


def write_ones(column: Int32 | int, index: Int32 | int = 0) -> None:
    """Whole warp: write scales of 1 for 128 rows to the warp's lanes, from a tensor-memory column on; complete after
    `tmem.wait_stores()`. index: of the chunk that begins there."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    address = tmem.lane_address(column, warp) + index * CHUNK_COLUMNS
    tmem.store(address, [Int32(_ONES)] * CHUNK_COLUMNS)
