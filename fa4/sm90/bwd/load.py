"""Load role, one warp: loads K and V once, and for every step Q with the row statistics, and dO.

Waits:   load_compute_{Q,dO}.free
Signals: load_compute_{K,V,Q,dO}.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...bwd.device.work import first_member
from ...core.sequence import clamp_tile, sequence_matrix
from ...pipeline.cursor import Cursor, produce
from ...pipeline.tma import bulk_load, tma_load, tma_load_panel
from .work import work_tile


@cute.jit
def load(context):
    """Issue the loads in the order of their use, which is also the order in which stages become free."""
    cfg, ends = context.cfg, context.ends("load")
    work = work_tile(context)
    q, do = produce(ends.load_compute_Q), produce(ends.load_compute_dO)
    if work.steps > 0:
        load_keys(context, produce(ends.load_compute_K), work, "k")
        if cutlass.const_expr(cfg.ctas == 2):
            load_peer_keys(context, produce(ends.load_compute_Kother), work)
    cute.arch.griddepcontrol_wait()  # the statistics kernel has finished
    first = first_member(context, work)
    for member in cutlass.range(cfg.group, unroll=1):
        head, own = work.head_kv * cfg.group + member, work.of_head(context, member)
        for i in cutlass.range(own.first, own.stop, unroll=1):
            at = (head, own.block(i))
            q.wait()
            q.expect_tx(cfg.q_tile.nbytes + cfg.rows_bytes)
            load_queries(context, q, work, "q", "Q", at)
            load_statistics(context, q, work, at)
            if (member == first) & (i == own.first):
                load_keys(context, produce(ends.load_compute_V), work, "v")
            do.wait()
            do.expect_tx(cfg.do_tile.nbytes)
            load_queries(context, do, work, "do", "dO", at)
            q, do = q.next(), do.next()


def load_keys(context, cursor: Cursor, work, name: str) -> None:
    """Load this CTA's block of K or V."""
    cfg, tma = context.cfg, context.tma(name)
    matrix = sequence_matrix(tma.tensor, work.head_kv, work.batch, work.k, cfg.varlen, cfg.lengths_vary)
    cursor.expect_tx(tma.tile.nbytes)
    own = work.n_block
    if cfg.ctas == 2 and cfg.lengths_vary:
        own = clamp_tile(own, work.k, tma.tile.rows)
    tma_load(tma, matrix, own, context.smem.pointer(name.upper(), cfg.dtype), cursor.barrier())


def load_peer_keys(context, cursor: Cursor, work) -> None:
    """CTA pair: load the peer CTA's keys in the dQ columns that this CTA computes."""
    cfg, tma, rank = context.cfg, context.tma("k"), context.args.order.rank
    matrix = sequence_matrix(tma.tensor, work.head_kv, work.batch, work.k, cfg.varlen, cfg.lengths_vary)
    cursor.expect_tx(cfg.peer_k_bytes)
    peer = work.n_block ^ 1
    if cfg.lengths_vary:
        peer = clamp_tile(peer, work.k, tma.tile.rows)
    for i in range(cfg.cta_panels):
        ptr = context.smem.pointer("Kother", cfg.dtype) + i * (tma.tile.panel_bytes // 2)
        tma_load_panel(tma, matrix, peer, rank * cfg.cta_panels + i, ptr, cursor.barrier())


def load_queries(context, cursor: Cursor, work, name: str, region: str, at: tuple[Int32, Int32]) -> None:
    """Load Q or dO of a step at (head, query block)."""
    cfg, tma = context.cfg, context.tma(name)
    matrix = sequence_matrix(tma.tensor, at[0], work.batch, work.q, cfg.varlen, cfg.lengths_vary)
    ptr = context.smem.pointer(region, cfg.dtype) + cursor.stage * (tma.tile.nbytes // 2)
    block, rank = at[1], context.args.order.rank
    if tma.multicast > 1:
        block = block * tma.multicast + rank  # a share of the rows; may be empty
        if cfg.lengths_vary:
            block = clamp_tile(block, work.q, tma.tile.rows // tma.multicast)
    tma_load(tma, matrix, block, ptr, cursor.barrier(), rank)


def load_statistics(context, cursor: Cursor, work, at: tuple[Int32, Int32]) -> None:
    """Load two floats per query of a step at (head, query block)."""
    cfg, rows = context.cfg, context.args.statistics
    source = rows.iterator + cute.crd2idx((0, 0, work.row_block + at[1], at[0]), rows.layout)
    with cute.arch.elect_one():
        target = context.smem.pointer("rows", Float32) + cursor.stage * (cfg.rows_bytes // 4)
        bulk_load(source, target, cfg.rows_bytes, cursor.barrier())
