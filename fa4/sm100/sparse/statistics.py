"""Row statistics of a CTA's heads in shared memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...bwd.device.list_work import SparseWork
from ...bwd.kernels.statistics import LANES, row_delta
from ...bwd.lists import SparseContext
from ...core.softmax import LOG2_E
from ..stages import CTA_ROWS


@cute.jit
def store_statistics(context: SparseContext, work: SparseWork, first: Int32, threads: cutlass.Constexpr[int]):
    """Store -lse * log2(e) and then -delta of 64 heads, from `first` on, to shared memory; -inf and 0 of heads without
    keys, and of rows without a head: their P and dS are 0. threads: that store them, the first ones of the CTA."""
    cfg, t, thread = context.cfg, context.args.tensors, cute.arch.thread_idx()[0]
    out, dout = work.matrix(t.out), work.matrix(t.dout)
    statistics = cute.make_tensor(context.smem.pointer("statistics", Float32), cute.make_layout(2 * CTA_ROWS))
    for first_row in cutlass.range_constexpr(0, CTA_ROWS, threads // LANES):
        row = first_row + thread // LANES
        head = first + row
        exists = Boolean(head < cfg.group)
        index = work.part * cfg.group + cutlass.min(head, cfg.group - 1)
        minus_delta = -row_delta(out, dout, head, exists, cfg)
        if const_expr(t.dlse is not None):
            minus_delta = minus_delta + t.dlse[work.token, index]
        lse = t.lse[work.token, index]
        has_keys = exists & (lse != -Float32.inf)
        if thread % LANES == 0:
            statistics[row] = Float32(cutlass.select_(has_keys, lse * -LOG2_E, -Float32.inf))
            statistics[CTA_ROWS + row] = Float32(cutlass.select_(has_keys, minus_delta, Float32(0.0)))
