"""Load role, one warp: brings K and V once, Q with its row statistics and dO for every step.

Waits:   load_mma_Q.free, load_mma_dO.free
Signals: load_mma_K.full, load_mma_V.full, load_mma_Q.full, load_mma_dO.full, in the order of use: K Q V dO, Q dO, ...
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..bulk import bulk_load
from ..channels import Ring
from ..copy import tma_load
from .work import sequence_matrix, work_tile


@cute.jit
def load(context):
    cfg, args, smem = context.cfg, context.args, context.smem
    ends = context.ends("load")
    q_tma, k_tma, v_tma, do_tma = (context.tma(name) for name in ("q", "k", "v", "do"))
    q_ring, do_ring = Ring.producer(ends.load_mma_Q.channel), Ring.producer(ends.load_mma_dO.channel)
    work = work_tile(context)
    k = sequence_matrix(k_tma.tensor, work.head_kv, work.batch, work.k, cfg)
    v = sequence_matrix(v_tma.tensor, work.head_kv, work.batch, work.k, cfg)

    if work.steps > 0:
        load_tile(ends.load_mma_K, 0, k_tma, k, work.n_block, smem.pointer("K", cfg.dtype))
    for member in cutlass.range(cfg.group, unroll=1):
        head = work.head_kv * cfg.group + member
        q = sequence_matrix(q_tma.tensor, head, work.batch, work.q, cfg)
        do = sequence_matrix(do_tma.tensor, head, work.batch, work.q, cfg)
        for m_block in cutlass.range(work.first, work.stop, unroll=1):
            stage = q_ring.index
            ends.load_mma_Q.wait_free(stage, q_ring.phase)
            load_tile(
                ends.load_mma_Q,
                stage,
                q_tma,
                q,
                m_block,
                smem.pointer("Q", cfg.dtype) + stage * (cfg.q_tile.nbytes // 2),
                more_bytes=cfg.rows_bytes,
            )
            statistics = args.rows.iterator + cute.crd2idx((0, 0, work.row_block + m_block, head), args.rows.layout)
            with cute.arch.elect_one():
                place = smem.pointer("rows", Float32) + stage * (cfg.rows_bytes // 4)
                bulk_load(statistics, place, cfg.rows_bytes, ends.load_mma_Q.full(stage))
            q_ring = q_ring.next()

            if member == 0 and m_block == work.first:
                load_tile(ends.load_mma_V, 0, v_tma, v, work.n_block, smem.pointer("V", cfg.dtype))
            stage = do_ring.index
            ends.load_mma_dO.wait_free(stage, do_ring.phase)
            place = smem.pointer("dO", cfg.dtype) + stage * (cfg.do_tile.nbytes // 2)
            load_tile(ends.load_mma_dO, stage, do_tma, do, m_block, place)
            do_ring = do_ring.next()


def load_tile(channel, stage, tma, matrix, row_tile, place, more_bytes: int = 0):
    """Start loading one tile into a stage; `more_bytes` will follow on the same barrier."""
    channel.expect(stage, tma.tile.nbytes + more_bytes)
    tma_load(tma, matrix, row_tile, place, channel.full(stage))
