"""Online softmax of a thread's rows in base 2: exp(scale * (s - max)) = exp2(scale_log2 * s - scale_log2 * max)."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from ..core.constant import Constant
from ..core.fragment_coords import reduce_row
from ..core.softmax import LOG2_E


class OnlineSoftmax(Constant):
    """Row max (of raw scores) and row sum of each of a thread's rows; each thread of the quad has its own partial sum.

    scale: factor from raw scores to logits. scale_log2: scale * log2(e).
    """

    def __init__(self, rows: int, scale: Float32) -> None:
        self.scale, self.scale_log2 = scale, scale * LOG2_E
        self.row_max, self.total = cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Float32)
        self.row_max.fill(-Float32.inf)
        self.total.fill(0.0)

    @cute.jit
    def update(self, scores: cute.Tensor, out: cute.Tensor, may_be_empty: cutlass.Constexpr[bool]):
        """Replace scores (rows, columns) by P = exp2(scale_log2 * (s - max)); rescale out (rows, columns) to the new
        row max. may_be_empty: all scores of a row so far may be -inf."""
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            row = scores[r, None].load()
            old_max = self.row_max[r]
            new_max = row.reduce(cute.ReductionOp.MAX, old_max, 0)
            new_max = reduce_row(new_max, cute.arch.fmax)
            self.row_max[r] = new_max
            finite_max = new_max
            if const_expr(may_be_empty):
                finite_max = Float32(0.0) if new_max == -Float32.inf else new_max
            scaled_max = finite_max * self.scale_log2
            p = cute.math.exp2(row * self.scale_log2 - scaled_max, fastmath=True)
            # Subtract first: for equal maxima the difference is exactly 0 and the factor exactly 1.
            factor = cute.math.exp2((old_max - finite_max) * self.scale_log2, fastmath=True)
            # Sum the block first: adding each P to the running total would round it hundreds of times.
            self.total[r] = self.total[r] * factor + p.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            scores[r, None].store(p)
            out[r, None].store(out[r, None].load() * factor)

    @cute.jit
    def finish(self, out: cute.Tensor, lse: cute.Tensor, sinks: cute.Tensor | None):
        """Divide out by the row sums and write the log-sum-exp (natural) of each row to lse.

        sinks: sink logit of each row, an extra term of the sum, or None. A row without unmasked keys becomes 0 with lse
        -inf (or its sink). Natural units and an exact logarithm, because lse needs more digits than P.
        """
        for r in cutlass.range_constexpr(cute.size(self.row_max)):
            total = reduce_row(self.total[r], lambda x, y: x + y)
            max_logit = self.row_max[r] * self.scale
            numerator = Float32(1.0)
            if const_expr(sinks is not None):
                max_with_sink = cute.arch.fmax(max_logit, sinks[r])
                max_with_sink = Float32(0.0) if max_with_sink == -Float32.inf else max_with_sink
                numerator = cute.math.exp(max_logit - max_with_sink)
                total = total * numerator + cute.math.exp(sinks[r] - max_with_sink)
                max_logit = max_with_sink
            is_empty = total == 0.0
            inverse = Float32(0.0) if is_empty else numerator / total
            lse[r] = -Float32.inf if is_empty else max_logit + cute.math.log(total)
            out[r, None].store(out[r, None].load() * inverse)
