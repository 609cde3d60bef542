"""Combine kernel of split-KV: join the partial results of a row.

Part s of a row is a normalised output o_s with log-sum-exp l_s over its share of the keys, and

    lse = log(exp(sink) + sum_s exp(l_s)),   out = sum_s exp(l_s - lse) o_s.

One warp joins a row; if there are many parts, several warps do: each adds every n-th part, and their sums are reduced
in shared memory. A part without a visible key has l_s = -inf and is ignored, whatever its o_s holds. A padding row has
l_s = +inf, written by the allocator of the parts: its out is 0 and its lse -inf, and the sink is not added.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ...core.program import Program
from ...core.vec_io import bits, load_floats, pack_half, store_vec
from ...runtime import jit
from ...runtime.device import Chip
from ..launchers import COMBINE_WARPS, PARTS_IN_FLIGHT, CombineConfig
from ..splits import MOST_SPLITS

_WARP = 32
_VECTOR = 4  # float32 in 16 bytes


class Parts(NamedTuple):
    """parts (splits, batch, rows, heads, dim), part_lse (splits, batch, heads, rows), out (batch, rows, heads, dim),
    lse (batch, heads, rows), sink (heads,) or None."""

    parts: cute.Tensor
    part_lse: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    sink: cute.Tensor | None


@dataclass(frozen=True, slots=True)
class CombineSteps(CombineConfig):
    """Steps of the kernel."""

    @property
    def rows(self) -> int:
        """Rows per block."""
        return COMBINE_WARPS // self.warps

    @cute.jit
    def load_lses(self, part_lse, lane):
        """Load l_s of the parts lane, lane + 32, ...; -inf past the last part."""
        lses = cute.make_rmem_tensor(MOST_SPLITS // _WARP, Float32)
        for i in cutlass.range_constexpr(MOST_SPLITS // _WARP):
            lses[i] = -Float32.inf
            if lane + _WARP * i < cute.size(part_lse):
                lses[i] = part_lse[lane + _WARP * i]
        return lses

    @cute.jit
    def total_lse(self, lses, sink, head) -> Float32:
        """log(exp(sink) + sum_s exp(l_s)); -inf if the sum is 0 or if this is a padding row."""
        row_max = lses[0]
        for i in cutlass.range_constexpr(1, MOST_SPLITS // _WARP):
            row_max = cute.arch.fmax(row_max, lses[i])
        row_max = cute.arch.warp_reduction_max(row_max)
        is_used = row_max != Float32.inf
        if const_expr(sink is not None):
            row_max = cute.arch.fmax(row_max, Float32(sink[head]))
        finite_max = Float32(0.0) if row_max == -Float32.inf or not is_used else row_max
        total = Float32(0.0)
        for i in cutlass.range_constexpr(MOST_SPLITS // _WARP):
            total += cute.math.exp(lses[i] - finite_max)
        total = cute.arch.warp_reduction_sum(total)
        if const_expr(sink is not None):
            total += cute.math.exp(Float32(sink[head]) - finite_max)
        return -Float32.inf if total == 0.0 or not is_used else finite_max + cute.math.log(total)

    @cute.jit
    def prefetch_parts(self, parts, warp, lane) -> list[list]:
        """Load this lane's columns of the first `PARTS_IN_FLIGHT` parts of this warp."""
        prefetched = [
            [cute.make_rmem_tensor(_VECTOR, Float32) for _ in range(0, self.head_dim_v, _WARP * _VECTOR)]
            for _ in range(PARTS_IN_FLIGHT)
        ]
        for i in cutlass.range_constexpr(PARTS_IN_FLIGHT):
            s = warp + i * self.warps
            for j, vector in enumerate(prefetched[i]):
                vector.fill(0.0)
                column = (_WARP * j + lane) * _VECTOR
                if s < cute.size(parts, mode=[0]) and column < self.head_dim_v:
                    ptr = parts.iterator + cute.crd2idx((s, column), parts.layout)
                    for k, value in enumerate(load_floats(ptr, _VECTOR)):
                        vector[k] = value
        return prefetched

    @cute.jit
    def accumulate(self, parts, prefetched, lses, lse, sums, warp, lane):
        """sums += exp(l_s - lse) o_s over the parts of this warp, four columns per lane at a time."""
        splits = cute.size(parts, mode=[0])
        for i in cutlass.range_constexpr(MOST_SPLITS // _WARP):
            weight = cute.math.exp(lses[i] - lse) if lse != -Float32.inf else Float32(0.0)
            count = cutlass.min(splits - _WARP * i, _WARP)
            first = warp
            if const_expr(i == 0):
                for part in cutlass.range_constexpr(PARTS_IN_FLIGHT):
                    factor = cute.arch.shuffle_sync(weight, warp + part * self.warps)
                    for vector, values in zip(sums, prefetched[part]):
                        add_weighted(vector, factor, [values[k] for k in range(_VECTOR)])
                first = warp + PARTS_IN_FLIGHT * self.warps
            for s in cutlass.range(first, count, self.warps, unroll=PARTS_IN_FLIGHT):
                factor = cute.arch.shuffle_sync(weight, s)
                for j, vector in enumerate(sums):
                    column = (_WARP * j + lane) * _VECTOR
                    if column < self.head_dim_v:
                        ptr = parts.iterator + cute.crd2idx((_WARP * i + s, column), parts.layout)
                        add_weighted(vector, factor, load_floats(ptr, _VECTOR))

    @cute.jit
    def reduce_warps(self, sums, warp, lane):
        """Add the sums of all warps of a row in its first warp."""
        smem_ptr = cute.arch.get_dyn_smem(Float32, alignment=16)
        for j, vector in enumerate(sums):
            column = (_WARP * j + lane) * _VECTOR
            if column < self.head_dim_v:
                store_vec(smem_ptr + warp * self.head_dim_v + column, [bits(vector[k]) for k in range(_VECTOR)])
        cute.arch.barrier()
        if warp % self.warps == 0:
            for j, vector in enumerate(sums):
                column = (_WARP * j + lane) * _VECTOR
                if column < self.head_dim_v:
                    for other in cutlass.range_constexpr(1, self.warps):
                        other_ptr = smem_ptr + (warp + other) * self.head_dim_v + column
                        for k, value in enumerate(load_floats(other_ptr, _VECTOR)):
                            vector[k] += value

    @cute.jit
    def write(self, out, sums, lane):
        """Round the sums of a row to the dtype of out and store them."""
        for j, vector in enumerate(sums):
            column = (_WARP * j + lane) * _VECTOR
            if column < self.head_dim_v:
                pairs = [pack_half(vector[k], vector[k + 1], out.element_type) for k in range(0, _VECTOR, 2)]
                store_vec(out.iterator + column, pairs)


def add_weighted(sums: cute.Tensor, factor: Float32, values: list[Float32]) -> None:
    """sums += factor * values. If factor is 0 the part has no visible key: its values are unwritten and may be NaN."""
    for k, value in enumerate(values):
        sums[k] += Float32(cutlass.select_(factor == 0.0, Float32(0.0), factor * value))


class _Combine(Program[CombineSteps]):
    @cute.jit
    def launch(self, x: Parts, cfg: cutlass.Constexpr[CombineSteps], stream):
        rows = x.out.shape[0] * x.out.shape[1] * x.out.shape[2]
        self.kernel(x, rows, cfg).launch(
            grid=[cute.ceil_div(rows, cfg.rows), 1, 1],
            block=[_WARP * COMBINE_WARPS, 1, 1],
            smem=4 * COMBINE_WARPS * cfg.head_dim_v,
            stream=stream,
            use_pdl=cfg.pdl,
        )

    @cute.kernel
    def kernel(self, x: Parts, rows: Int32, cfg: cutlass.Constexpr[CombineSteps]):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(thread // _WARP), thread % _WARP
        row = block * cfg.rows + warp // cfg.warps
        head = row % x.out.shape[2]
        query = row // x.out.shape[2] % x.out.shape[1]
        sequence = row // x.out.shape[2] // x.out.shape[1]
        if const_expr(cfg.pdl):
            cute.arch.griddepcontrol_wait()  # the forward kernel writes the parts
            cute.arch.griddepcontrol_launch_dependents()
        sums = [cute.make_rmem_tensor(_VECTOR, Float32) for _ in range(0, cfg.head_dim_v, _WARP * _VECTOR)]
        for vector in sums:
            vector.fill(0.0)
        if row < rows:
            row_parts = x.parts[None, sequence, query, head, None]
            prefetched = cfg.prefetch_parts(row_parts, warp % cfg.warps, lane)
            lses = cfg.load_lses(x.part_lse[None, sequence, head, query], lane)
            lse = cfg.total_lse(lses, x.sink, head)
            if warp % cfg.warps == 0 and lane == 0:
                x.lse[sequence, head, query] = lse
            cfg.accumulate(row_parts, prefetched, lses, lse, sums, warp % cfg.warps, lane)
        if const_expr(cfg.warps > 1):
            cfg.reduce_warps(sums, warp, lane)
        if row < rows and warp % cfg.warps == 0:
            cfg.write(x.out[sequence, query, head, None], sums, lane)

    def fake_args(self, cfg: CombineSteps) -> tuple:
        return (
            Parts(
                jit.fake_tensor(Float32, 5, contiguous=True),
                jit.fake_tensor(Float32, 4, contiguous=True, align=4),
                jit.fake_tensor(jit.dsl_dtype(cfg.dtype), 4, contiguous=True),
                jit.fake_tensor(Float32, 3, contiguous=True, align=4),
                jit.fake_tensor(Float32, 1, align=2) if cfg.has_sink else None,
            ),
        )

    def compile(self, cfg: CombineConfig, chip: Chip) -> Any:
        steps = CombineSteps(*(getattr(cfg, field.name) for field in fields(cfg)))
        return Program.compile(self, steps, chip)


KERNEL = _Combine("combine")
