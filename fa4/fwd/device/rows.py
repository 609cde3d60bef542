"""Rows of a work tile: their query and head, the position of their results, and the end of their softmax."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from ...core.sequence import sequence_matrix
from ...core.softmax import LOG2_E
from ...core.vec_io import rounded
from ..launch import ForwardContext
from ..variant import ForwardVariant
from .work import Work


def query_of(cfg: ForwardVariant, row: Int32):
    """Query index of a tile row."""
    return row // cfg.rows_per_query if cfg.rows_per_query > 1 else row


def head_of(cfg: ForwardVariant, row: Int32):
    """Packed head of a tile row; `packed` or more in a padding row."""
    return row % cfg.rows_per_query if cfg.rows_per_query > 1 else 0


def row_coord_of(cfg: ForwardVariant, row: Int32):
    """Row coordinate of a tile row in `as_matrices` and `as_columns`."""
    return (head_of(cfg, row), query_of(cfg, row)) if cfg.packed_heads > 1 else row


def result(context: ForwardContext, name: str, work: Work) -> cute.Tensor:
    """Matrix of out or lse that contains the rows of a work tile."""
    x = getattr(context.args, name)
    if context.cfg.split:
        x = x[(*[None] * (len(x.shape) - 1), work.part)]
    return sequence_matrix(x, work.head, work.batch, work.query_rows, context.cfg.varlen)


def is_written(cfg: ForwardVariant, work: Work, row: Int32) -> Boolean:
    """True if the kernel writes the results of this tile row: the row belongs to the sequence and to a head.

    With split-KV the kernel does not write the parts of padding rows: the combine kernel recognises their preset lse.
    """
    count = work.q.count if cfg.split else work.query_rows.count
    return Boolean((query_of(cfg, row) < count) & (head_of(cfg, row) < cfg.packed_heads))


@cute.jit
def normalise(
    context: ForwardContext,
    work: Work,
    row: Int32,
    query: Int32,
    row_max_scaled: Float32,
    row_sum: Float32,
    largest_p: Float32,
    counted: Float32 | None = None,
):
    """Return (factor that normalises O, log-sum-exp) of a row; (0, -inf) without a visible key and for padding rows.

    largest_p: largest P of the row. O is a sum of rounded P, row_sum is a sum of unrounded P. If the rescale of O
    is delayed, the largest P is not 1 and is rounded too. In a row dominated by one key, that rounding would scale the
    whole row of O. So O is divided by a sum in which the largest P is rounded. counted: what row_sum has instead of the
    largest P, if P is an approximation.
    """
    cfg, args = context.cfg, context.args
    numerator = Float32(1.0)
    # Without a visible key `largest_p` is not a number, although a sink makes `row_sum` positive below.
    in_sum = largest_p if const_expr(counted is None) else counted
    rounding_correction = Float32(0.0)
    if const_expr(cfg.rounds_largest_p):
        rounding_correction = rounded(in_sum, cfg.v_dtype) - largest_p if row_sum != 0.0 else Float32(0.0)
    if const_expr(counted is not None):
        row_sum = row_sum + (largest_p - counted) if row_sum != 0.0 else row_sum
    if const_expr(cfg.has_sink):
        head = head_of(cfg, row)
        if const_expr(cfg.rows_per_query > cfg.packed_heads):
            head = cutlass.min(head, cfg.packed_heads - 1)
        sink = args.sink[work.head * cfg.packed_heads + head] * LOG2_E
        row_max = cute.arch.fmax(row_max_scaled, sink)
        row_max = Float32(0.0) if row_max == -Float32.inf else row_max
        numerator = cute.math.exp2(row_max_scaled - row_max, fastmath=True)
        row_sum = row_sum * numerator + cute.math.exp2(sink - row_max, fastmath=True)
        row_max_scaled = row_max
    holds_data = query < work.q.count
    has_keys = holds_data and row_sum != 0.0  # also true for NaN
    norm = numerator * cute.arch.rcp_approx(row_sum + numerator * rounding_correction) if has_keys else Float32(0.0)
    lse = row_max_scaled * args.to_natural + cute.math.log(row_sum) if has_keys else -Float32.inf
    return norm, lse
