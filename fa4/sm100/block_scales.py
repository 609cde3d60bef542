"""Scales of blocks of 32 numbers: their layout, and their way to tensor memory, where products read them.

A chunk has the scales of up to 128 rows of an operand (rows of Q, keys of K, columns of V) and of four blocks along the
reduction: 512 bytes, that of block b of row r at byte 16 (r % 32) + 4 (r // 32) + b. An operand with more blocks has
several chunks. The host lays out scales in chunks, those of a tile one after the other; kernels load them in bulk.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32

from ..runtime.spec import E8M0_ONE
from . import tmem
from .mma import CHUNK_BYTES, CHUNK_COLUMNS, copy_chunk

_ONES = E8M0_ONE * 0x01010101  # of four blocks


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
