"""Join the parts of a forward whose keys were split among blocks.

Part s of a row is a normalised output o_s with log-sum-exp l_s over its share of the keys, and

    lse = log(exp(sink) + sum_s exp(l_s)),   out = sum_s exp(l_s - lse) o_s.

One warp joins one row. Parts that saw nothing have l_s = -inf and are not read. A row that no sequence uses has
l_s = +inf, as whoever allocated the parts left it: it becomes 0 with lse -inf, and takes no sink.
"""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from .. import jit
from ..device import Chip

_WARPS = 4
_VECTOR = 4  # float32 in 16 bytes


@dataclass(frozen=True)
class Combine:
    """What the generated code depends on, and so the compile key."""

    dtype: torch.dtype
    head_dim_v: int
    sink_dtype: torch.dtype | None

    def compile(self, chip: Chip):
        """Compile the launcher, whose arguments are those of `__call__` without the stream."""
        return jit.compile_kernel(
            self,
            jit.fake_tensor(Float32, 5, contiguous=True),
            jit.fake_tensor(Float32, 4, contiguous=True, align=4),
            jit.fake_tensor(jit.dsl_dtype(self.dtype), 4, contiguous=True),
            jit.fake_tensor(Float32, 3, contiguous=True, align=4),
            jit.fake_tensor(jit.dsl_dtype(self.sink_dtype), 1, align=2) if self.sink_dtype else None,
            jit.current_stream(),
            chip=chip,
        )

    @cute.jit
    def __call__(
        self,
        parts: cute.Tensor,
        part_lse: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sink: cute.Tensor | None,
        stream,
    ):
        """parts (splits, batch, rows, heads, dim), part_lse (splits, batch, heads, rows),
        out (batch, rows, heads, dim), lse (batch, heads, rows)."""
        rows = out.shape[0] * out.shape[1] * out.shape[2]
        self.kernel(parts, part_lse, out, lse, sink, rows).launch(
            grid=[cute.ceil_div(rows, _WARPS), 1, 1], block=[32 * _WARPS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        parts: cute.Tensor,
        part_lse: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sink: cute.Tensor | None,
        rows: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block * _WARPS + thread // 32
        head = row % out.shape[2]
        query = row // out.shape[2] % out.shape[1]
        sequence = row // out.shape[2] // out.shape[1]
        if row < rows:
            of_row = part_lse[None, sequence, head, query]
            total = -Float32.inf
            if of_row[0] != Float32.inf:
                total = self.total_lse(of_row, sink, head, thread % 32)
            if thread % 32 == 0:
                lse[sequence, head, query] = total
            self.weigh(parts, of_row, out[sequence, query, head, None], total, (sequence, query, head), thread % 32)

    @cute.jit
    def total_lse(self, part_lse, sink, head, lane) -> Float32:
        """log(exp(sink) + sum_s exp(l_s)); -inf if there is nothing."""
        splits = cute.size(part_lse)
        top = -Float32.inf
        for s in cutlass.range(lane, splits, 32):
            top = cute.arch.fmax(top, part_lse[s])
        top = cute.arch.warp_reduction_max(top)
        if cutlass.const_expr(sink is not None):
            top = cute.arch.fmax(top, Float32(sink[head]))
        reference = Float32(0.0) if top == -Float32.inf else top
        total = Float32(0.0)
        for s in cutlass.range(lane, splits, 32):
            total += cute.math.exp(part_lse[s] - reference)
        total = cute.arch.warp_reduction_sum(total)
        if cutlass.const_expr(sink is not None):
            total += cute.math.exp(Float32(sink[head]) - reference)
        return -Float32.inf if total == 0.0 else reference + cute.math.log(total)

    @cute.jit
    def weigh(self, parts, part_lse, out, total, row, lane):
        """out = sum_s exp(l_s - total) o_s, four columns a lane at a time."""
        layout = cute.make_layout(_VECTOR)
        for first in cutlass.range_constexpr(0, self.head_dim_v, 32 * _VECTOR):
            column = first + lane * _VECTOR
            if column < self.head_dim_v:
                acc = cute.make_rmem_tensor(_VECTOR, Float32)
                part = cute.make_rmem_tensor(_VECTOR, Float32)
                acc.fill(0.0)
                for s in cutlass.range(cute.size(part_lse)):
                    if part_lse[s] != -Float32.inf and part_lse[s] != Float32.inf:
                        weight = cute.math.exp(part_lse[s] - total)
                        address = parts.iterator + cute.crd2idx((s, *row, column), parts.layout)
                        cute.autovec_copy(cute.make_tensor(address.align(16), layout), part)
                        acc.store(acc.load() + part.load() * weight)
                half = cute.make_rmem_tensor(_VECTOR, out.element_type)
                half.store(acc.load().to(out.element_type))
                target = (out.iterator + column).align(8)
                cute.autovec_copy(half, cute.make_tensor(target, layout))


def launcher(dtype: torch.dtype, head_dim_v: int, has_sink: bool, chip: Chip) -> jit.Launcher:
    """The compiled kernel, which takes parts, part_lse, out, lse and the sink, float32 or None."""
    kernel = Combine(dtype, head_dim_v, torch.float32 if has_sink else None)
    return jit.compiled(("combine", *astuple(kernel)), functools.partial(kernel.compile, chip), chip)
