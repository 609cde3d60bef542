"""Sums of rows by key, in a fixed order: each key's row of the total gets the rows that are listed for it, one by one.

A warp has a key and a head, and 16 bytes of each row per lane. It loads several rows at a time, and adds them in order.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.program import Program
from ...core.sequence import align_strides
from ...core.vec_io import bits, load_floats, load_halves, store_vec
from ...pipeline.roles import WARP
from ...runtime import jit
from ..launchers import OrderedSumsConfig

_WARPS = 8  # of a CTA
_AHEAD = 8  # rows in flight


class OrderedSums(NamedTuple):
    """rows: (number of rows, heads, columns). order: indices of rows, by key, int32. starts: where the indices of a key
    begin, and of the last one end, (keys + 1,) int32. total: (keys, heads, columns) float32, row-major."""

    rows: cute.Tensor
    order: cute.Tensor
    starts: cute.Tensor
    total: cute.Tensor


class _AddInOrder(Program[OrderedSumsConfig]):
    @cute.jit
    def launch(self, x: OrderedSums, cfg: cutlass.Constexpr[OrderedSumsConfig], stream):
        x = x._replace(rows=align_strides(x.rows), total=align_strides(x.total))
        warps = x.total.shape[0] * x.total.shape[1]
        ctas = cute.ceil_div(warps, _WARPS)
        self.kernel(x, warps, cfg).launch(grid=(ctas, 1, 1), block=(_WARPS * WARP, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: OrderedSums, warps: Int32, cfg: cutlass.Constexpr[OrderedSumsConfig]):
        index = cute.arch.block_idx()[0] * _WARPS + cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if index < warps:
            key, head = index // x.total.shape[1], index % x.total.shape[1]
            for first in cutlass.range_constexpr(0, cfg.columns, WARP * cfg.width):
                column = first + cute.arch.lane_idx() * cfg.width
                if column < cfg.columns:
                    add_rows(x, cfg, key, head, column)

    def fake_args(self, cfg: OrderedSumsConfig) -> tuple:
        rows, total = jit.fake_tensor(jit.dsl_dtype(cfg.dtype), 3), jit.fake_tensor(Float32, 3)
        order, starts = (jit.fake_tensor(Int32, 1, align=4) for _ in range(2))
        return (OrderedSums(rows, order, starts, total),)


@cute.jit
def add_rows(x: OrderedSums, cfg: cutlass.Constexpr[OrderedSumsConfig], key: Int32, head: Int32, column: Int32):
    """Add the columns of a lane."""
    begin, end = x.starts[key], x.starts[key + 1]
    if begin < end:
        target = x.total.iterator + cute.crd2idx((key, head, column), x.total.layout)
        total = cute.make_rmem_tensor(cfg.width, Float32)
        for first in cutlass.range_constexpr(0, cfg.width, 4):
            for i, value in enumerate(load_floats(target + first, 4)):
                total[first + i] = value
        for i in cutlass.range(begin, end, _AHEAD, unroll=1):
            loaded = [load_row(x, cfg, x.order[cutlass.min(i + j, end - 1)], head, column) for j in range(_AHEAD)]
            for j in cutlass.range_constexpr(_AHEAD):
                if i + j < end:
                    for c in cutlass.range_constexpr(cfg.width):
                        total[c] = total[c] + loaded[j][c]
        for first in cutlass.range_constexpr(0, cfg.width, 4):
            store_vec(target + first, [bits(total[first + i]) for i in range(4)])


def load_row(x: OrderedSums, cfg: OrderedSumsConfig, row: Int32, head: Int32, column: Int32) -> list[Float32]:
    source = x.rows.iterator + cute.crd2idx((row, head, column), x.rows.layout)
    return load_floats(source, cfg.width) if cfg.dtype.itemsize == 4 else load_halves(source, x.rows.element_type)


KERNEL = _AddInOrder("add_in_order")
