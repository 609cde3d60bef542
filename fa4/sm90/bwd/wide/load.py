"""Load role, one warp: loads K and V once, and for every step Q with the row statistics, and dO. A CTA of a pair also
loads the keys of its peer, and Q and dO may come by multicast.

Waits:   load_compute_{Q,dO}.free
Signals: load_compute_{K,V,Q,dO}.full; in a pair load_compute_Kother.full
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import const_expr

from ....core.rows import clamp_tile
from ....core.sequence import sequence_matrix
from ....pipeline.cursor import Cursor, produce
from ....pipeline.tma import tma_load_panel
from ..common.load import load_keys, load_steps
from ..common.work import Sm90BackwardWork, work_tile
from .context import Sm90WideContext


@cute.jit
def load(context: Sm90WideContext):
    work = work_tile(context)
    if work.steps > 0:
        load_keys(context, work, "K")
        if const_expr(context.cfg.ctas == 2):
            load_peer_keys(context, produce(context.ends("load").load_compute_Kother), work)
    load_steps(context, work)


def load_peer_keys(context: Sm90WideContext, cursor: Cursor, work: Sm90BackwardWork) -> None:
    """CTA pair: load the peer CTA's keys in the dQ columns that this CTA computes."""
    cfg, tma, rank = context.cfg, context.tma("k"), context.args.order.rank
    matrix = sequence_matrix(tma.tensor, work.head_kv, work.batch, work.k, cfg.varlen, cfg.lengths_vary)
    cursor.expect_tx(cfg.peer_k_bytes)
    peer = work.n_block ^ 1
    if cfg.lengths_vary:
        peer = clamp_tile(peer, work.k, tma.tile.rows)
    for i in range(cfg.cta_panels):
        ptr = context.smem.pointer("Kother", cfg.dtype) + i * (tma.tile.panel_bytes // 2)
        tma_load_panel(tma, matrix, peer, cfg.panel(rank * cfg.cta_panels + i), ptr, cursor.barrier())
