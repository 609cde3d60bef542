"""What a row's softmax ends with."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..core.softmax import LOG2_E


@cute.jit
def normalise(context, work, row: Int32, query: Int32, reference: Float32, total: Float32):
    """(factor that normalises O, log-sum-exp) of a row; (0, -inf) if it saw no key or holds no data."""
    cfg, args = context.cfg, context.args
    numerator = Float32(1.0)
    if cutlass.const_expr(cfg.has_sink):
        head = work.head * cfg.packed + (row % cfg.packed if cfg.packed > 1 else 0)
        sink = args.sink[head] * LOG2_E
        top = cute.arch.fmax(reference, sink)
        top = Float32(0.0) if top == -Float32.inf else top
        numerator = cute.math.exp2(reference - top, fastmath=True)
        total = total * numerator + cute.math.exp2(sink - top, fastmath=True)
        reference = top
    holds_data = query < work.q.count
    is_seen = holds_data and total != 0.0  # a NaN is seen
    norm = numerator * cute.arch.rcp_approx(total) if is_seen else Float32(0.0)
    lse = reference * args.to_natural + cute.math.log(total) if is_seen else -Float32.inf
    return norm, lse
