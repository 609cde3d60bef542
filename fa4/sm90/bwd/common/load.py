"""Load role, one warp: loads K and V once, and for every step Q with the row statistics, and dO.

Waits:   load_compute_{Q,dO}.free
Signals: load_compute_{K,V,Q,dO}.full
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ....bwd.device.work import first_member
from ....core.sequence import sequence_matrix
from ....pipeline.cursor import Cursor, produce
from ....pipeline.tma import bulk_load, tma_load
from .context import Sm90StepsContext
from .work import Sm90BackwardWork, work_tile


@cute.jit
def load(context: Sm90StepsContext):
    work = work_tile(context)
    if work.steps > 0:
        load_keys(context, work, "K")
    load_steps(context, work)


@cute.jit
def load_steps(context: Sm90StepsContext, work: Sm90BackwardWork):
    """Issue all loads but that of K in the order of their use, which is also the order in which stages become free."""
    cfg, ends = context.cfg, context.ends("load")
    q, do = produce(ends.load_compute_Q), produce(ends.load_compute_dO)
    cute.arch.griddepcontrol_wait()  # the statistics kernel has finished
    first = first_member(context, work)
    for member in cutlass.range(cfg.group, unroll=1):
        head, own = work.head_kv * cfg.group + member, work.of_head(context, member)
        for i in cutlass.range(own.first, own.stop, unroll=1):
            m_block = own.block(i)
            q.wait()
            load_tile(context, q, work, "Q", head, m_block)
            load_statistics(context, q, work, head, m_block)
            if (member == first) & (i == own.first):
                load_keys(context, work, "V")
            do.wait()
            load_tile(context, do, work, "dO", head, m_block)
            q, do = q.next(), do.next()


def load_keys(context: Sm90StepsContext, work: Sm90BackwardWork, name: str) -> None:
    """Load this CTA's block of K or V."""
    cursor = produce(getattr(context.ends("load"), f"load_compute_{name}"))
    load_tile(context, cursor, work, name, work.head_kv, work.n_block)


def load_tile(
    context: Sm90StepsContext, cursor: Cursor, work: Sm90BackwardWork, name: str, head: Int32, block: Int32
) -> None:
    """Load this CTA's share of a block of rows of K, V, Q or dO."""
    cfg, tma, rank = context.cfg, context.tma(name.lower()), context.args.order.rank
    rows = work.k if name in ("K", "V") else work.q
    matrix = sequence_matrix(tma.tensor, head, work.batch, rows, cfg.varlen, cfg.lengths_vary)
    cursor.expect_tx(tma.tile.nbytes + (cfg.rows_bytes if name == "Q" else 0))  # Q comes with the row statistics
    ptr = context.smem.pointer(name, cfg.dtype) + cursor.stage * (tma.tile.nbytes // 2)
    tma_load(tma, matrix, cfg.cta_share(tma, block, rank, rows), ptr, cursor.barrier(), rank)


def load_statistics(
    context: Sm90StepsContext, cursor: Cursor, work: Sm90BackwardWork, head: Int32, m_block: Int32
) -> None:
    """Load two floats per query of a step."""
    cfg, rows = context.cfg, context.args.statistics
    source = rows.iterator + cute.crd2idx((0, 0, work.row_block + m_block, head), rows.layout)
    with cute.arch.elect_one():
        target = context.smem.pointer("rows", Float32) + cursor.stage * (cfg.rows_bytes // 4)
        bulk_load(source, target, cfg.rows_bytes, cursor.barrier())
