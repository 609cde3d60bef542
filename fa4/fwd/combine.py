"""Join the parts of a forward whose keys were split among blocks.

Part s of a row is a normalised output o_s with log-sum-exp l_s over its share of the keys, and

    lse = log(exp(sink) + sum_s exp(l_s)),   out = sum_s exp(l_s - lse) o_s.

A row is joined by one warp, or by several where there are many parts: each takes every so manieth part, and their sums
meet in shared memory. Parts that saw nothing have l_s = -inf and do not count, whatever they hold. A row that no
sequence uses has l_s = +inf, as whoever allocated the parts left it: it becomes 0 with lse -inf, and takes no sink.
"""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from .. import jit
from ..core.words import bits, load_floats, pack_half, store_words
from ..device import Chip
from .splits import MOST_SPLITS

_WARP = 32
_WARPS = 8  # of a block
_VECTOR = 4  # float32 in 16 bytes
_IN_FLIGHT = 4  # parts that a warp loads before it adds the first of them, and before it knows what they weigh


@dataclass(frozen=True)
class Combine:
    """What the generated code depends on, and so the compile key.

    warps: that join a row, a power of two up to a block's. pdl: programmatic dependent launch, which sm_90 was the
    first to have.
    """

    dtype: torch.dtype
    head_dim_v: int
    sink_dtype: torch.dtype | None
    warps: int
    pdl: bool

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

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return _WARPS // self.warps

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
            grid=[cute.ceil_div(rows, self.rows), 1, 1],
            block=[_WARP * _WARPS, 1, 1],
            smem=4 * _WARPS * self.head_dim_v,
            stream=stream,
            use_pdl=self.pdl,
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
        warp, lane = cute.arch.make_warp_uniform(thread // _WARP), thread % _WARP
        row = block * self.rows + warp // self.warps
        head = row % out.shape[2]
        query = row // out.shape[2] % out.shape[1]
        sequence = row // out.shape[2] // out.shape[1]
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()  # the parts are another kernel's
            cute.arch.griddepcontrol_launch_dependents()
        sums = [cute.make_rmem_tensor(_VECTOR, Float32) for _ in range(0, self.head_dim_v, _WARP * _VECTOR)]
        for vector in sums:
            vector.fill(0.0)
        if row < rows:
            of_row = parts[None, sequence, query, head, None]
            held = self.first_parts(of_row, warp % self.warps, lane)
            lses = self.own_lses(part_lse[None, sequence, head, query], lane)
            total = self.total_lse(lses, sink, head)
            if warp % self.warps == 0 and lane == 0:
                lse[sequence, head, query] = total
            self.add_up(of_row, held, lses, total, sums, warp % self.warps, lane)
        if cutlass.const_expr(self.warps > 1):
            self.meet(sums, warp, lane)
        if row < rows and warp % self.warps == 0:
            self.write(out[sequence, query, head, None], sums, lane)

    @cute.jit
    def own_lses(self, part_lse, lane):
        """l_s of parts lane, lane + 32, ..., -inf where there is none; all of them -inf in a row that nobody uses."""
        lses = cute.make_rmem_tensor(MOST_SPLITS // _WARP, Float32)
        for i in cutlass.range_constexpr(MOST_SPLITS // _WARP):
            lses[i] = -Float32.inf
            if lane + _WARP * i < cute.size(part_lse):
                lses[i] = part_lse[lane + _WARP * i]
        return lses

    @cute.jit
    def total_lse(self, lses, sink, head) -> Float32:
        """log(exp(sink) + sum_s exp(l_s)); -inf if there is nothing, or if the row is not used."""
        top = lses[0]
        for i in cutlass.range_constexpr(1, MOST_SPLITS // _WARP):
            top = cute.arch.fmax(top, lses[i])
        top = cute.arch.warp_reduction_max(top)
        is_used = top != Float32.inf
        if cutlass.const_expr(sink is not None):
            top = cute.arch.fmax(top, Float32(sink[head]))
        reference = Float32(0.0) if top == -Float32.inf or not is_used else top
        total = Float32(0.0)
        for i in cutlass.range_constexpr(MOST_SPLITS // _WARP):
            total += cute.math.exp(lses[i] - reference)
        total = cute.arch.warp_reduction_sum(total)
        if cutlass.const_expr(sink is not None):
            total += cute.math.exp(Float32(sink[head]) - reference)
        return -Float32.inf if total == 0.0 or not is_used else reference + cute.math.log(total)

    @cute.jit
    def first_parts(self, parts, warp, lane) -> list[list]:
        """This lane's columns of the first `_IN_FLIGHT` of this warp's parts."""
        held = [
            [cute.make_rmem_tensor(_VECTOR, Float32) for _ in range(0, self.head_dim_v, _WARP * _VECTOR)]
            for _ in range(_IN_FLIGHT)
        ]
        for i in cutlass.range_constexpr(_IN_FLIGHT):
            s = warp + i * self.warps
            for j, vector in enumerate(held[i]):
                vector.fill(0.0)
                column = (_WARP * j + lane) * _VECTOR
                if s < cute.size(parts, mode=[0]) and column < self.head_dim_v:
                    place = parts.iterator + cute.crd2idx((s, column), parts.layout)
                    for k, value in enumerate(load_floats(place, _VECTOR)):
                        vector[k] = value
        return held

    @cute.jit
    def add_up(self, parts, held, lses, total, sums, warp, lane):
        """sums += exp(l_s - total) o_s over this warp's parts, four columns a lane at a time."""
        splits = cute.size(parts, mode=[0])
        for i in cutlass.range_constexpr(MOST_SPLITS // _WARP):
            weight = cute.math.exp(lses[i] - total) if total != -Float32.inf else Float32(0.0)
            count = cutlass.min(splits - _WARP * i, _WARP)
            first = warp
            if cutlass.const_expr(i == 0):
                for part in cutlass.range_constexpr(_IN_FLIGHT):
                    factor = cute.arch.shuffle_sync(weight, warp + part * self.warps)
                    for vector, values in zip(sums, held[part]):
                        add_weighted(vector, factor, [values[k] for k in range(_VECTOR)])
                first = warp + _IN_FLIGHT * self.warps
            for s in cutlass.range(first, count, self.warps, unroll=_IN_FLIGHT):
                factor = cute.arch.shuffle_sync(weight, s)
                for j, vector in enumerate(sums):
                    column = (_WARP * j + lane) * _VECTOR
                    if column < self.head_dim_v:
                        place = parts.iterator + cute.crd2idx((_WARP * i + s, column), parts.layout)
                        add_weighted(vector, factor, load_floats(place, _VECTOR))

    @cute.jit
    def meet(self, sums, warp, lane):
        """The sums of a row's warps, at its first one."""
        place = cute.arch.get_dyn_smem(Float32, alignment=16)
        for j, vector in enumerate(sums):
            column = (_WARP * j + lane) * _VECTOR
            if column < self.head_dim_v:
                store_words(place + warp * self.head_dim_v + column, [bits(vector[k]) for k in range(_VECTOR)])
        cute.arch.barrier()
        if warp % self.warps == 0:
            for j, vector in enumerate(sums):
                column = (_WARP * j + lane) * _VECTOR
                if column < self.head_dim_v:
                    for other in cutlass.range_constexpr(1, self.warps):
                        there = place + (warp + other) * self.head_dim_v + column
                        for k, value in enumerate(load_floats(there, _VECTOR)):
                            vector[k] += value

    @cute.jit
    def write(self, out, sums, lane):
        """Round a row's sums to the output's type."""
        for j, vector in enumerate(sums):
            column = (_WARP * j + lane) * _VECTOR
            if column < self.head_dim_v:
                words = [pack_half(vector[k], vector[k + 1], out.element_type) for k in range(0, _VECTOR, 2)]
                store_words(out.iterator + column, words)


def add_weighted(sums: cute.Tensor, factor: Float32, values: list[Float32]) -> None:
    """sums += factor * values; of a part that saw nothing these were not written, and may be anything, NaN included."""
    for k, value in enumerate(values):
        sums[k] += Float32(cutlass.select_(factor == 0.0, Float32(0.0), factor * value))


def launcher(dtype: torch.dtype, head_dim_v: int, has_sink: bool, splits: int, chip: Chip) -> jit.Launcher:
    """The compiled kernel, which takes parts, part_lse, out, lse and the sink, float32 or None."""
    warps = min(1 << (-(-splits // _IN_FLIGHT) - 1).bit_length(), _WARPS)
    kernel = Combine(dtype, head_dim_v, torch.float32 if has_sink else None, warps, chip.number >= 90)
    return jit.compiled(("combine", *astuple(kernel)), functools.partial(kernel.compile, chip), chip)
