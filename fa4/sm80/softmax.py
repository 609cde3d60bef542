"""Online softmax over a thread's rows, in base 2: exp(scale * (s - max)) = exp2(scale_log2 * s - scale_log2 * max)."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..core.constant import Constant
from ..core.softmax import LOG2_E


def quad_reduce(value: Float32, combine) -> Float32:
    """Over the four threads that share a row of an mma accumulator."""
    for offset in (2, 1):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=offset, mask=-1, mask_and_clamp=31))
    return value


@dataclass(frozen=True)
class OnlineSoftmax(Constant):
    """Running maximum (raw scores) and sum of each of a thread's rows; the sum is still split over the quad.

    scale: what multiplies raw scores to give logits. scale_log2: the same in base 2.
    """

    scale: Float32
    scale_log2: Float32
    maximum: cute.Tensor
    total: cute.Tensor

    @staticmethod
    def start(rows: int, scale: Float32) -> OnlineSoftmax:
        maximum, total = cute.make_rmem_tensor(rows, Float32), cute.make_rmem_tensor(rows, Float32)
        maximum.fill(-Float32.inf)
        total.fill(0.0)
        return OnlineSoftmax(scale, scale * LOG2_E, maximum, total)

    @cute.jit
    def update(self, scores: cute.Tensor, out: cute.Tensor, may_be_empty: cutlass.Constexpr[bool]):
        """Turn scores (rows, columns) into exp2(scale_log2 * (s - max)) in place; rescale out (rows, columns) to the
        new maximum. `may_be_empty`: a row may have seen nothing but -inf so far."""
        for r in cutlass.range_constexpr(cute.size(self.maximum)):
            row = scores[r, None].load()
            before = self.maximum[r]
            biggest = row.reduce(cute.ReductionOp.MAX, before, 0)
            biggest = quad_reduce(biggest, cute.arch.fmax)
            self.maximum[r] = biggest
            reference = biggest
            if cutlass.const_expr(may_be_empty):
                reference = Float32(0.0) if biggest == -Float32.inf else biggest
            shift = reference * self.scale_log2
            weights = cute.math.exp2(row * self.scale_log2 - shift, fastmath=True)
            # The difference first: of equal maxima it is 0 however it is compiled, and the factor 1.
            factor = cute.math.exp2((before - reference) * self.scale_log2, fastmath=True)
            # The block's sum first: adding each weight to the running total would round it hundreds of times.
            self.total[r] = self.total[r] * factor + weights.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            scores[r, None].store(weights)
            out[r, None].store(out[r, None].load() * factor)

    @cute.jit
    def finish(self, out: cute.Tensor, lse: cute.Tensor, sinks: cute.Tensor | None):
        """Divide out by the sums and write each row's log-sum-exp (natural) into lse.

        sinks: each row's sink logit, an extra term of the sum; None for none. A row that saw nothing becomes 0 with
        lse -inf (or its sink). Natural units and an exact logarithm here: lse carries more digits than the weights.
        """
        for r in cutlass.range_constexpr(cute.size(self.maximum)):
            total = quad_reduce(self.total[r], lambda x, y: x + y)
            shift = self.maximum[r] * self.scale
            numerator = Float32(1.0)
            if cutlass.const_expr(sinks is not None):
                row_max = cute.arch.fmax(shift, sinks[r])
                row_max = Float32(0.0) if row_max == -Float32.inf else row_max
                numerator = cute.math.exp(shift - row_max)
                total = total * numerator + cute.math.exp(sinks[r] - row_max)
                shift = row_max
            empty = total == 0.0
            inverse = Float32(0.0) if empty else numerator / total
            lse[r] = -Float32.inf if empty else shift + cute.math.log(total)
            out[r, None].store(out[r, None].load() * inverse)
