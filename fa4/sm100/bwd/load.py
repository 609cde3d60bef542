"""Load role, one warp: brings K and V once, and for every step Q, dO and the row statistics.

A pair of CTAs brings Q, dO and K twice: this CTA's rows with all columns, and all rows with this CTA's columns.

Waits:   load_mma_{Q,dO}.free; of a pair also load_mma_{Qcolumns,dOcolumns}.free
Signals: the same channels' full, load_mma_{K,V}.full, load_compute_rows.full; of a pair also load_mma_Kcolumns.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.sequence import sequence_matrix
from ...pipeline.channels import Ring, announce
from ...pipeline.tma import bulk_load, tma_load, tma_load_panel
from .work import work_tile


@cute.jit
def load(context):
    """Copies in the order of their use, which is also the order in which their stages become free."""
    cfg, ends = context.cfg, context.ends("load")
    is_pair = cutlass.const_expr(cfg.ctas == 2)
    work = work_tile(context)
    q, do = Ring.producer(ends.load_mma_Q.channel), Ring.producer(ends.load_mma_dO.channel)
    rows = Ring.producer(ends.load_compute_rows.channel)
    columns = Int32(1)  # the phase of a pair's single stages of Q's and dO's columns
    at = (work.head_kv * cfg.group, work.first)
    if work.steps > 0:
        load_keys(context, ends.load_mma_K, work, "k", "K")
        load_queries(context, ends.load_mma_Q, work, "q", "Q", at, q)
        load_statistics(context, ends.load_compute_rows, work, at, rows)
        load_keys(context, ends.load_mma_V, work, "v", "V")
        if cutlass.const_expr(is_pair):
            load_columns(context, ends.load_mma_Kcolumns, work, "k", "Kcolumns", (work.head_kv, work.n_block), work.k)
    q, rows = q.next(), rows.next()
    for i in cutlass.range(work.steps, unroll=1):
        at, coming = work.step(i, cfg.group), work.step(i + 1, cfg.group)
        ends.load_mma_dO.wait_free(do.index, do.phase)
        load_queries(context, ends.load_mma_dO, work, "do", "dO", at, do)
        do = do.next()
        if cutlass.const_expr(is_pair):
            ends.load_mma_dOcolumns.wait_free(0, columns)
            load_columns(context, ends.load_mma_dOcolumns, work, "do", "dOcolumns", at, work.q)
        if i + 1 < work.steps:
            ends.load_mma_Q.wait_free(q.index, q.phase)
            load_queries(context, ends.load_mma_Q, work, "q", "Q", coming, q)
        q = q.next()
        if cutlass.const_expr(is_pair):
            ends.load_mma_Qcolumns.wait_free(0, columns)
            load_columns(context, ends.load_mma_Qcolumns, work, "q", "Qcolumns", at, work.q)
        if i + 1 < work.steps:
            # The stage is free: the Q of the step before this one, just waited for, was freed by that step's dK.
            load_statistics(context, ends.load_compute_rows, work, coming, rows)
        rows = rows.next()
        columns = columns ^ 1


@cute.jit
def load_keys(context, end, work, name: cutlass.Constexpr[str], region: cutlass.Constexpr[str]):
    """This CTA's block of keys."""
    tma = context.tma(name)
    matrix = sequence_matrix(tma.tensor, work.head_kv, work.batch, work.k, context.cfg.varlen, context.cfg.ragged)
    announce(end, 0, tma.tile.nbytes, work.rank)
    tma_load(tma, matrix, work.own_block, context.smem.pointer(region, context.cfg.dtype), end.full(0))


@cute.jit
def load_queries(context, end, work, name: cutlass.Constexpr[str], region: cutlass.Constexpr[str], at, ring: Ring):
    """The queries of a step at (head, query block): of a pair, this CTA's half of them."""
    cfg, tma = context.cfg, context.tma(name)
    head, m_block = at
    matrix = sequence_matrix(tma.tensor, head, work.batch, work.q, cfg.varlen, cfg.ragged)
    place = context.smem.pointer(region, cfg.dtype) + ring.index * (tma.tile.nbytes // 2)
    announce(end, ring.index, tma.tile.nbytes, work.rank)
    tma_load(tma, matrix, m_block * cfg.ctas + work.rank, place, end.full(ring.index))


@cute.jit
def load_columns(context, end, work, name: cutlass.Constexpr[str], region: cutlass.Constexpr[str], at, rows):
    """A pair: this CTA's panel of both CTAs' tiles at (head, block)."""
    cfg, tma = context.cfg, context.tma(name)
    head, block = at
    matrix = sequence_matrix(tma.tensor, head, work.batch, rows, cfg.varlen, cfg.ragged)
    announce(end, 0, 2 * tma.tile.panel_bytes, work.rank)
    for i in cutlass.range_constexpr(2):
        place = context.smem.pointer(region, cfg.dtype) + i * (tma.tile.panel_bytes // 2)
        tma_load_panel(tma, matrix, 2 * block + i, work.rank, place, end.full(0))


@cute.jit
def load_statistics(context, end, work, at, ring: Ring):
    """Two floats for each query of a step at (head, query block)."""
    cfg, rows = context.cfg, context.args.statistics
    head, m_block = at
    place = (0, 0, work.row_block + m_block, head)
    end.expect(ring.index, cfg.rows_bytes)
    with cute.arch.elect_one():
        target = context.smem.pointer("rows", Float32) + ring.index * (cfg.rows_bytes // 4)
        bulk_load(rows.iterator + cute.crd2idx(place, rows.layout), target, cfg.rows_bytes, end.full(ring.index))
