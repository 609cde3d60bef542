"""A thread's two rows of a tile: statistics of their softmax, and the store of their dQ."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ...bwd.device.list_work import SparseWork
from ...core.fragment_coords import reduce_row
from ...core.softmax import LOG2_E
from ...core.vec_io import load_halves, pack_half, store_vec
from ...pipeline.fragment import LANES_PER_ROW, ROWS_PER_THREAD, first_column, row_in_warp
from .context import Sm90SparseContext

_VECTOR = 8  # columns per lane and iteration


class RowStatistics(NamedTuple):
    """-lse * log2(e) and -delta = dlse - rowsum(dO * O) of each row; -inf and 0 of rows without keys, and of rows that
    do not exist: their P and dS are 0."""

    minus_lse: list[Float32]
    minus_delta: list[Float32]

    @staticmethod
    def of(context: Sm90SparseContext, work: SparseWork, first: Int32) -> RowStatistics:
        """Compute them. first: the warp's first row."""
        cfg, t = context.cfg, context.args.tensors
        minus_lse, minus_delta = [], []
        for r in range(ROWS_PER_THREAD):
            row = first + row_in_warp(r)
            exists, row = Boolean(row < cfg.group), cutlass.min(row, cfg.group - 1)
            head = work.part * cfg.group + row
            lse = t.lse[work.token, head]
            has_keys = exists & (lse != -Float32.inf)
            minus = -row_delta(context, work, row)
            if t.dlse is not None:
                minus = minus + t.dlse[work.token, head]
            minus_lse.append(Float32(cutlass.select_(has_keys, lse * -LOG2_E, -Float32.inf)))
            minus_delta.append(Float32(cutlass.select_(has_keys, minus, Float32(0.0))))
        return RowStatistics(minus_lse, minus_delta)


def row_delta(context: Sm90SparseContext, work: SparseWork, row: Int32) -> Float32:
    """Return the sum of dO * O over a row, which exists; the four threads of the row all get it."""
    columns, total = context.cfg.head_dim_v, Float32(0.0)
    out, dout = (work.matrix(x) for x in (context.args.tensors.out, context.args.tensors.dout))
    for first in range(0, columns, LANES_PER_ROW * _VECTOR):
        column = first + cute.arch.lane_idx() % LANES_PER_ROW * _VECTOR
        exists = Boolean(column < columns)
        column = cutlass.select_(exists, column, Int32(0))
        o, do = (
            load_halves(x.iterator + cute.crd2idx((row, column), x.layout), context.cfg.dtype) for x in (out, dout)
        )
        for i in range(_VECTOR):
            total = total + Float32(cutlass.select_(exists, o[i] * do[i], Float32(0.0)))
    return reduce_row(total, lambda a, b: a + b)


@cute.jit
def store_dq(context: Sm90SparseContext, work: SparseWork, first: Int32, dq: cute.Tensor):
    """Store a warp's rows of dQ, times the scale. first: its first row."""
    cfg, scale = context.cfg, context.args.scale
    matrix = work.matrix(context.args.tensors.dq)
    for r in cutlass.range_constexpr(ROWS_PER_THREAD):
        row = first + row_in_warp(r)
        if row < cfg.group:
            target = matrix.iterator + cute.crd2idx((row, first_column()), matrix.layout)
            for pair in cutlass.range_constexpr(cfg.head_dim // 8):
                low, high = (dq[4 * pair + 2 * r + i] * scale for i in range(2))
                store_vec(target + 8 * pair, [pack_half(low, high, cfg.dtype)])
