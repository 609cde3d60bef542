"""Join the parts of a forward whose keys were split among blocks.

Part s of a row is a normalised output o_s with log-sum-exp l_s over its share of the keys, and

    lse = log(exp(sink) + sum_s exp(l_s)),   out = sum_s exp(l_s - lse) o_s.

A row is joined by one warp, or by several where there are many parts: each takes every so manieth part, and their sums
meet in shared memory. Parts that saw nothing have l_s = -inf and do not count, whatever they hold. A row that no
sequence uses has l_s = +inf, as whoever allocated the parts left it: it becomes 0 with lse -inf, and takes no sink.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from .. import jit
from ..core.constant import Constant
from ..core.program import Program
from ..core.vec_io import bits, load_floats, pack_half, store_vec
from ..device import Chip
from .splits import MOST_SPLITS

_WARP = 32
_WARPS = 8  # of a block
_VECTOR = 4  # float32 in 16 bytes
_IN_FLIGHT = 4  # parts that a warp loads before it adds the first of them, and before it knows what they weigh


class Parts(NamedTuple):
    """parts (splits, batch, rows, heads, dim), part_lse (splits, batch, heads, rows), out (batch, rows, heads, dim),
    lse (batch, heads, rows), sink (heads,) or None."""

    parts: cute.Tensor
    part_lse: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    sink: cute.Tensor | None


@dataclass(frozen=True, slots=True)
class Config(Constant):
    """What the generated code depends on, and steps of it.

    warps: that join a row, a power of two up to a block's. pdl: programmatic dependent launch, which sm_90 was the
    first to have.
    """

    dtype: torch.dtype
    head_dim_v: int
    has_sink: bool
    warps: int
    pdl: bool

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return _WARPS // self.warps

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
        row_max = lses[0]
        for i in cutlass.range_constexpr(1, MOST_SPLITS // _WARP):
            row_max = cute.arch.fmax(row_max, lses[i])
        row_max = cute.arch.warp_reduction_max(row_max)
        is_used = row_max != Float32.inf
        if cutlass.const_expr(sink is not None):
            row_max = cute.arch.fmax(row_max, Float32(sink[head]))
        reference = Float32(0.0) if row_max == -Float32.inf or not is_used else row_max
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
                store_vec(place + warp * self.head_dim_v + column, [bits(vector[k]) for k in range(_VECTOR)])
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
                store_vec(out.iterator + column, words)


def add_weighted(sums: cute.Tensor, factor: Float32, values: list[Float32]) -> None:
    """sums += factor * values; of a part that saw nothing these were not written, and may be anything, NaN included."""
    for k, value in enumerate(values):
        sums[k] += Float32(cutlass.select_(factor == 0.0, Float32(0.0), factor * value))


class _Combine(Program):
    @cute.jit
    def launch(self, x: Parts, cfg: cutlass.Constexpr[Config], stream):
        rows = x.out.shape[0] * x.out.shape[1] * x.out.shape[2]
        self.kernel(x, rows, cfg).launch(
            grid=[cute.ceil_div(rows, cfg.rows), 1, 1],
            block=[_WARP * _WARPS, 1, 1],
            smem=4 * _WARPS * cfg.head_dim_v,
            stream=stream,
            use_pdl=cfg.pdl,
        )

    @cute.kernel
    def kernel(self, x: Parts, rows: Int32, cfg: cutlass.Constexpr[Config]):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(thread // _WARP), thread % _WARP
        row = block * cfg.rows + warp // cfg.warps
        head = row % x.out.shape[2]
        query = row // x.out.shape[2] % x.out.shape[1]
        sequence = row // x.out.shape[2] // x.out.shape[1]
        if cutlass.const_expr(cfg.pdl):
            cute.arch.griddepcontrol_wait()  # the parts are another kernel's
            cute.arch.griddepcontrol_launch_dependents()
        sums = [cute.make_rmem_tensor(_VECTOR, Float32) for _ in range(0, cfg.head_dim_v, _WARP * _VECTOR)]
        for vector in sums:
            vector.fill(0.0)
        if row < rows:
            of_row = x.parts[None, sequence, query, head, None]
            held = cfg.first_parts(of_row, warp % cfg.warps, lane)
            lses = cfg.own_lses(x.part_lse[None, sequence, head, query], lane)
            total = cfg.total_lse(lses, x.sink, head)
            if warp % cfg.warps == 0 and lane == 0:
                x.lse[sequence, head, query] = total
            cfg.add_up(of_row, held, lses, total, sums, warp % cfg.warps, lane)
        if cutlass.const_expr(cfg.warps > 1):
            cfg.meet(sums, warp, lane)
        if row < rows and warp % cfg.warps == 0:
            cfg.write(x.out[sequence, query, head, None], sums, lane)

    def stand_ins(self, cfg: Config) -> tuple:
        return (
            Parts(
                jit.fake_tensor(Float32, 5, contiguous=True),
                jit.fake_tensor(Float32, 4, contiguous=True, align=4),
                jit.fake_tensor(jit.dsl_dtype(cfg.dtype), 4, contiguous=True),
                jit.fake_tensor(Float32, 3, contiguous=True, align=4),
                jit.fake_tensor(Float32, 1, align=2) if cfg.has_sink else None,
            ),
        )


_COMBINE = _Combine("combine")


def launcher(dtype: torch.dtype, head_dim_v: int, has_sink: bool, splits: int, chip: Chip) -> jit.Launcher:
    """What takes `Parts`, the sink float32."""
    warps = min(1 << (-(-splits // _IN_FLIGHT) - 1).bit_length(), _WARPS)
    return _COMBINE.launcher(Config(dtype, head_dim_v, has_sink, warps, chip.number >= 90), chip)
