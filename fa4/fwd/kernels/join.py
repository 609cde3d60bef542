"""Join kernel: merge the attention over a second set of keys into out and lse, in place.

One pass over memory, where torch takes several. With l and m the log-sum-exps of a row over the two sets of keys, and o
and p the normalised outputs,

    lse = log(exp(l) + exp(m)),   out = exp(l - lse) o + exp(m - lse) p.

A row without a visible key has lse -inf and weight 0.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from ...core.program import Program
from ...core.vec_io import bits, load_floats, load_halves, pack_half, store_vec
from ...runtime import jit
from ..launchers import JOIN_VECTOR, JoinConfig

_THREADS = 256
_IN_FLIGHT = 4  # rows per lane


class JoinTensors(NamedTuple):
    """out, more: (batch, rows, heads, dim). lse, more_lse: (batch, heads, rows) float32. out and lse are updated."""

    out: cute.Tensor
    lse: cute.Tensor
    more: cute.Tensor
    more_lse: cute.Tensor


def rows_per_block(cfg: JoinConfig) -> int:
    return _THREADS // cfg.lanes * _IN_FLIGHT


class _Join(Program[JoinConfig]):
    @cute.jit
    def launch(self, x: JoinTensors, cfg: cutlass.Constexpr[JoinConfig], stream):
        rows = x.out.shape[0] * x.out.shape[1] * x.out.shape[2]
        self.kernel(x, rows, cfg).launch(
            grid=(cute.ceil_div(rows, rows_per_block(cfg)), 1, 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: JoinTensors, rows: Int32, cfg: cutlass.Constexpr[JoinConfig]):
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        lane, first = thread % cfg.lanes, block * rows_per_block(cfg) + thread // cfg.lanes
        first_column = lane * JOIN_VECTOR
        loaded = [[cute.make_rmem_tensor(n, Float32) for n in (JOIN_VECTOR, JOIN_VECTOR, 2)] for _ in range(_IN_FLIGHT)]
        for i in cutlass.range_constexpr(_IN_FLIGHT):
            row = first + i * (_THREADS // cfg.lanes)
            if row < rows and first_column < cfg.head_dim_v:
                sequence, query, head = _row_coord(x.out, row)
                values, others, lses = loaded[i]
                _read(values, x.out[sequence, query, head, None].iterator + first_column, cfg.out)
                _read(others, x.more[sequence, query, head, None].iterator + first_column, cfg.dtype)
                lses[0], lses[1] = x.lse[sequence, head, query], x.more_lse[sequence, head, query]
        cute.arch.sync_warp()  # all lanes of a row have read its lse
        for i in cutlass.range_constexpr(_IN_FLIGHT):
            row = first + i * (_THREADS // cfg.lanes)
            if row < rows and first_column < cfg.head_dim_v:
                sequence, query, head = _row_coord(x.out, row)
                values, others, lses = loaded[i]
                row_max = cute.arch.fmax(lses[0], lses[1])
                finite_max = Float32(cutlass.select_(row_max == -Float32.inf, Float32(0.0), row_max))
                weights = [cute.math.exp(lses[j] - finite_max) for j in range(2)]
                total = weights[0] + weights[1]
                factor = Float32(cutlass.select_(total == 0.0, Float32(0.0), 1.0 / total))
                weight, other_weight = weights[0] * factor, weights[1] * factor
                sums = [weight * values[k] + other_weight * others[k] for k in range(JOIN_VECTOR)]
                _write(x.out[sequence, query, head, None].iterator + first_column, sums, cfg.out)
                if lane == 0:
                    x.lse[sequence, head, query] = finite_max + cute.math.log(total)

    def fake_args(self, cfg: JoinConfig) -> tuple:
        dtype, out = jit.dsl_dtype(cfg.dtype), jit.dsl_dtype(cfg.out)
        lse = jit.fake_tensor(Float32, 3, align=4)
        more_lse = jit.fake_tensor(Float32, 3, contiguous=True, align=4)
        return (JoinTensors(jit.fake_tensor(out, 4), lse, jit.fake_tensor(dtype, 4, contiguous=True), more_lse),)


def _row_coord(x: cute.Tensor, row: Int32) -> tuple[Int32, Int32, Int32]:
    """(sequence, query, head) of a row index over (batch, rows, heads)."""
    heads, queries = x.shape[2], x.shape[1]
    return row // heads // queries, row // heads % queries, row % heads


def _read(values: cute.Tensor, pointer: cute.Pointer, dtype: torch.dtype) -> None:
    """Load a lane's columns of a row as float32."""
    pointer = pointer.align(16)
    if dtype == torch.float32:
        loaded = [*load_floats(pointer, 4), *load_floats(pointer + 4, 4)]
    else:
        loaded = load_halves(pointer, jit.dsl_dtype(dtype))
    for k, value in enumerate(loaded):
        values[k] = value


def _write(pointer: cute.Pointer, values: list[Float32], dtype: torch.dtype) -> None:
    pointer = pointer.align(16)
    if dtype == torch.float32:
        store_vec(pointer, [bits(x) for x in values[:4]])
        store_vec(pointer + 4, [bits(x) for x in values[4:]])
    else:
        pairs = [pack_half(values[k], values[k + 1], jit.dsl_dtype(dtype)) for k in range(0, JOIN_VECTOR, 2)]
        store_vec(pointer, pairs)


KERNEL = _Join("join_states")
