"""The rows of a work tile: which query and head each is, where its results are, and what its softmax ends with."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from ..core.sequence import sequence_matrix
from ..core.softmax import LOG2_E


def slots_of(packed: int) -> int:
    """Rows of a tile that a query takes with this many heads packed: the next power of two."""
    return 1 << (packed - 1).bit_length()


def query_of(cfg, row):
    """The query of a tile's row."""
    return row // cfg.slots if cfg.slots > 1 else row


def head_of(cfg, row):
    """Which of the packed heads a tile's row is; not less than `packed` where it is none."""
    return row % cfg.slots if cfg.slots > 1 else 0


def place_of(cfg, row):
    """Where `as_matrices` and `as_columns` have a tile's row."""
    return (head_of(cfg, row), query_of(cfg, row)) if cfg.packed > 1 else row


def result(context, name: str, work) -> cute.Tensor:
    """The matrix of out or of lse that a work tile's rows are in."""
    x = getattr(context.args, name)
    if context.cfg.split:
        x = x[(*[None] * (len(x.shape) - 1), work.part)]
    return sequence_matrix(x, work.head, work.batch, work.place, context.cfg.varlen)


def is_written(cfg, work, row: Int32) -> Boolean:
    """Whether a row of the tile is one of the sequence's, so that its results have a place.

    Of rows that hold no data, those of a part are not the kernel's: whoever joins the parts knows them by what they
    were set to.
    """
    count = work.q.count if cfg.split else work.place.count
    return Boolean((query_of(cfg, row) < count) & (head_of(cfg, row) < cfg.packed))


@cute.jit
def normalise(context, work, row: Int32, query: Int32, reference: Float32, total: Float32, largest: Float32):
    """(factor that normalises O, log-sum-exp) of a row; (0, -inf) if it saw no key or holds no data.

    largest: of the row's weights P. O is a sum of weights that are rounded, total of weights that are not. Where O
    tolerates a grown maximum the largest is no longer 1, and in a row that one key rules O would be off by its rounding
    as a whole. So O is divided by a total with that one rounded too.
    """
    cfg, args = context.cfg, context.args
    numerator = Float32(1.0)
    # Of a row that saw no key `largest` is no number, though a sink makes its total positive below.
    rounding_correction = Float32(cfg.v_dtype(largest)) - largest if total != 0.0 else Float32(0.0)
    if cutlass.const_expr(cfg.has_sink):
        head = head_of(cfg, row)
        if cutlass.const_expr(cfg.slots > cfg.packed):
            head = cutlass.min(head, cfg.packed - 1)
        sink = args.sink[work.head * cfg.packed + head] * LOG2_E
        row_max = cute.arch.fmax(reference, sink)
        row_max = Float32(0.0) if row_max == -Float32.inf else row_max
        numerator = cute.math.exp2(reference - row_max, fastmath=True)
        total = total * numerator + cute.math.exp2(sink - row_max, fastmath=True)
        reference = row_max
    holds_data = query < work.q.count
    is_seen = holds_data and total != 0.0  # a NaN is seen
    norm = numerator * cute.arch.rcp_approx(total + numerator * rounding_correction) if is_seen else Float32(0.0)
    lse = reference * args.to_natural + cute.math.log(total) if is_seen else -Float32.inf
    return norm, lse
