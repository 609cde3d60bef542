"""Load role, one warp: brings K and V once, and for every step Q, dO and the row statistics.

A pair of CTAs brings Q, dO and K twice: this CTA's rows with all columns, and all rows with this CTA's columns.

Waits:   load_mma_{Q,dO}.free; of a pair also load_mma_{Qcolumns,dOcolumns}.free
Signals: the same channels' full, load_mma_{K,V}.full, load_compute_rows.full; of a pair also load_mma_Kcolumns.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.sequence import clamp_tile, sequence_matrix
from ...pipeline.cursor import Cursor, produce
from ...pipeline.tma import bulk_load, tma_load, tma_load_panel
from .work import Place, following, work_tile


@cute.jit
def load(context):
    """Copies in the order of their use, which is also the order in which their stages become free."""
    cfg, ends = context.cfg, context.ends("load")
    is_pair = cutlass.const_expr(cfg.ctas == 2)
    work = work_tile(context)
    q, do, rows = produce(ends.load_mma_Q), produce(ends.load_mma_dO), produce(ends.load_compute_rows)
    if cutlass.const_expr(is_pair):
        q_columns, do_columns = produce(ends.load_mma_Qcolumns), produce(ends.load_mma_dOcolumns)
    at, listed = (work.head_kv * cfg.group, work.block(work.first)), Place(Int32(0), Int32(0))
    if cutlass.const_expr(cfg.lists_by_head):
        listed = Place.first(context, work)
        at = listed.at(context, work)
    if work.steps > 0:
        load_keys(context, produce(ends.load_mma_K), work, "k", "K")
        load_queries(context, q, work, "q", "Q", at)
        load_statistics(context, rows, work, at)
        load_keys(context, produce(ends.load_mma_V), work, "v", "V")
        if cutlass.const_expr(is_pair):
            place = (work.head_kv, work.n_block)
            load_columns(context, produce(ends.load_mma_Kcolumns), work, "k", "Kcolumns", place, work.k)
    q, rows = q.next(), rows.next()
    for i in cutlass.range(work.steps, unroll=1):
        if cutlass.const_expr(cfg.lists_by_head):
            at = listed.at(context, work)
            listed = following(context, work, listed)
            coming = listed.at(context, work)
        else:
            at, coming = work.step(i, cfg.group), work.step(i + 1, cfg.group)
        do.wait()
        load_queries(context, do, work, "do", "dO", at)
        do = do.next()
        if cutlass.const_expr(is_pair):
            q_columns.in_step(do_columns).wait()
            load_columns(context, do_columns, work, "do", "dOcolumns", at, work.q)
        if i + 1 < work.steps:
            q.wait()
            load_queries(context, q, work, "q", "Q", coming)
        q = q.next()
        if cutlass.const_expr(is_pair):
            q_columns.wait()
            load_columns(context, q_columns, work, "q", "Qcolumns", at, work.q)
            q_columns = q_columns.next()
        if i + 1 < work.steps:
            # The stage is free: the Q of the step before this one, just waited for, was freed by that step's dK.
            load_statistics(context, rows, work, coming)
        rows = rows.next()


@cute.jit
def load_keys(context, cursor: Cursor, work, name: cutlass.Constexpr[str], region: cutlass.Constexpr[str]):
    """This CTA's block of keys."""
    tma = context.tma(name)
    matrix = sequence_matrix(tma.tensor, work.head_kv, work.batch, work.k, context.cfg.varlen, context.cfg.lengths_vary)
    cursor.expect_tx(tma.tile.nbytes, work.rank)
    own = work.own_block
    if cutlass.const_expr(context.cfg.lengths_vary):
        own = clamp_tile(own, work.k, tma.tile.rows)
    tma_load(tma, matrix, own, context.smem.pointer(region, context.cfg.dtype), cursor.barrier())


@cute.jit
def load_queries(context, cursor: Cursor, work, name: cutlass.Constexpr[str], region: cutlass.Constexpr[str], at):
    """The queries of a step at (head, query block): of a pair, this CTA's half of them."""
    cfg, tma = context.cfg, context.tma(name)
    head, m_block = at
    matrix = sequence_matrix(tma.tensor, head, work.batch, work.q, cfg.varlen, cfg.lengths_vary)
    place = context.smem.pointer(region, cfg.dtype) + cursor.stage * cfg.elements(tma.tile.nbytes)
    cursor.expect_tx(tma.tile.nbytes, work.rank)
    own = m_block * cfg.ctas + work.rank
    if cutlass.const_expr(cfg.lengths_vary):
        own = clamp_tile(own, work.q, tma.tile.rows)
    tma_load(tma, matrix, own, place, cursor.barrier())


@cute.jit
def load_columns(context, cursor: Cursor, work, name: cutlass.Constexpr[str], region: cutlass.Constexpr[str], at, rows):
    """A pair: this CTA's panel of both CTAs' tiles at (head, block)."""
    cfg, tma = context.cfg, context.tma(name)
    head, block = at
    matrix = sequence_matrix(tma.tensor, head, work.batch, rows, cfg.varlen, cfg.lengths_vary)
    cursor.expect_tx(2 * tma.tile.panel_bytes, work.rank)
    for i in cutlass.range_constexpr(2):
        place = context.smem.pointer(region, cfg.dtype) + i * cfg.elements(tma.tile.panel_bytes)
        number = 2 * block + i
        if cutlass.const_expr(cfg.lengths_vary):
            number = clamp_tile(number, rows, tma.tile.rows)
        tma_load_panel(tma, matrix, number, work.rank, place, cursor.barrier())


@cute.jit
def load_statistics(context, cursor: Cursor, work, at):
    """Two floats for each query of a step at (head, query block)."""
    cfg, rows = context.cfg, context.args.statistics
    head, m_block = at
    place = (0, 0, work.row_block + m_block, head)
    cursor.expect_tx(cfg.rows_bytes)
    with cute.arch.elect_one():
        target = context.smem.pointer("rows", Float32) + cursor.stage * (cfg.rows_bytes // 4)
        bulk_load(rows.iterator + cute.crd2idx(place, rows.layout), target, cfg.rows_bytes, cursor.barrier())
