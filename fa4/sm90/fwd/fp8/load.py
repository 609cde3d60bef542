"""Load role, one warp: TMA loads of Q, K and the transposed V, in the order in which the products read them.

Waits:   load_compute_Q.free, load_compute_K.free, load_compute_V.free
Signals: load_compute_Q.full, load_compute_K.full, load_compute_V.full
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Uint8

from ....core.rows import Rows
from ....core.sequence import sequence_matrix
from ....fwd.device.load import load_qkv
from ....fwd.device.work import Work
from ....pipeline.cursor import Cursor, Lane, produce
from ....pipeline.tma import tma_load, tma_load_panel
from .context import Fp8Context


@cute.jit
def load(context: Fp8Context):
    cfg, ends = context.cfg, context.ends("load")
    q = [produce(ends.load_compute_Q, Lane(consumer, cfg.consumers)) for consumer in range(cfg.consumers)]
    load_qkv(context, q, produce(ends.load_compute_K), produce(ends.load_compute_V), load_k, load_v)


def load_k(context: Fp8Context, work: Work, block: Int32, cursor: Cursor) -> None:
    cfg, tma = context.cfg, context.tma("k")
    ((matrix, tile),) = work.keys.pieces_of(tma.tensor, work.head_kv, block, cfg.tile_n, 1, False)
    cursor.wait()
    cursor.expect_tx(tma.tile.nbytes)
    pointer = context.smem.pointer("K", Uint8) + cursor.stage * tma.tile.nbytes
    tma_load(tma, matrix, tile, pointer, cursor.barrier())


def load_v(context: Fp8Context, work: Work, block: Int32, cursor: Cursor) -> None:
    """Load a block of the transposed V."""
    tma = context.tma("v")
    columns = sequence_matrix(tma.tensor, work.head_kv, work.batch, Rows(Int32(0), Int32(0)), False)
    cursor.wait()
    cursor.expect_tx(tma.tile.nbytes)
    pointer = context.smem.pointer("V", Uint8) + cursor.stage * tma.tile.nbytes
    tma_load_panel(tma, columns, Int32(0), block, pointer, cursor.barrier())
