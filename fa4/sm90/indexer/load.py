"""Load role, one warp: TMA loads of the queries of all consumers, then of the key blocks of each sequence.

Waits:   load_compute_K.free
Signals: load_compute_Q.full, load_compute_K.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...pipeline.cursor import ALL, Cursor, produce
from ...pipeline.tma import tma_load
from .context import Keys, ScoresContext, Work


@cute.jit
def load(context: ScoresContext):
    ends, work = context.ends("load"), Work.here(context)
    k = produce(ends.load_compute_K)
    if work.sequence <= work.last_sequence:
        load_q(context, work, produce(ends.load_compute_Q, ALL))
    for sequence in cutlass.range(work.sequence, work.last_sequence + 1, unroll=1):
        keys = Keys.of(context, work, sequence)
        for i in cutlass.range(keys.blocks, unroll=1):
            load_k(context, keys, keys.first_block + i, k)
            k = k.next()


def load_q(context: ScoresContext, work: Work, q: Cursor) -> None:
    """Load the queries of each consumer."""
    cfg, tma = context.cfg, context.tma("q")
    matrix = cute.domain_offset((work.first * cfg.heads, 0), tma.tensor)
    pointer = context.smem.pointer("Q", tma_dtype(context))
    for consumer in range(cfg.consumers):
        q.expect_tx(tma.tile.nbytes, stage=consumer)
        target = pointer + consumer * tma_elements(context, tma.tile.nbytes)
        tma_load(tma, matrix, Int32(consumer), target, q.barrier(consumer))


def load_k(context: ScoresContext, keys: Keys, block: Int32, k: Cursor) -> None:
    """Load a key block. Rows of other sequences may follow the last key of a sequence; their scores are not stored."""
    cfg, tma = context.cfg, context.tma("k")
    k.wait()
    k.expect_tx(tma.tile.nbytes)
    pointer = context.smem.pointer("K", tma_dtype(context)) + k.stage * tma_elements(context, tma.tile.nbytes)
    for piece in range(cfg.pieces):
        row = key_row(context, keys, block * cfg.tile_n + piece * tma.tile.piece_rows)
        tma_load(tma, cute.domain_offset((row, 0), tma.tensor), Int32(0), pointer, k.barrier(), piece)


def key_row(context: ScoresContext, keys: Keys, key: Int32) -> Int32:
    """Return the row of k that holds a key, or for a key past the end of the sequence some row."""
    tensors, size = context.args.tensors, context.cfg.page_size
    if size == 0:
        return keys.begin + key
    key = cutlass.min(key, keys.count - 1)  # the table says nothing of later pages
    return tensors.page_table[keys.sequence, key // size] * size + key % size


def tma_dtype(context: ScoresContext) -> type[cutlass.Numeric]:
    """Element type of loads: e4m3 numbers are passed as bytes."""
    return cutlass.Uint8 if context.cfg.dtype.width == 8 else context.cfg.dtype


def tma_elements(context: ScoresContext, nbytes: int) -> int:
    return nbytes * 8 // context.cfg.dtype.width
