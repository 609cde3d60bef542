"""Join attention over more keys to attention over others, in place: one pass over memory, where torch takes several.

With l and m the log-sum-exps of a row's logits over either set of keys, and o and p the normalised outputs,

    lse = log(exp(l) + exp(m)),   out = exp(l - lse) o + exp(m - lse) p.

A row that saw no key has -inf, and counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from .. import jit
from ..core.program import Program
from ..core.vec_io import bits, load_floats, load_halves, pack_half, store_vec
from ..device import Chip

_THREADS = 256
_VECTOR = 8  # columns of a lane: 16 bytes of halves
_IN_FLIGHT = 4  # rows of a lane


@dataclass(frozen=True, slots=True)
class Config:
    """dtype: of what is joined, two bytes. out: of the sums, the same or float32."""

    dtype: torch.dtype
    out: torch.dtype
    head_dim_v: int

    @property
    def lanes(self) -> int:
        """Of a row, a power of two: its statistics are read by all of them before one writes."""
        return 1 << (self.head_dim_v // _VECTOR - 1).bit_length()

    @property
    def rows(self) -> int:
        """Of a block."""
        return _THREADS // self.lanes * _IN_FLIGHT


class States(NamedTuple):
    """out and more (batch, rows, heads, dim), lse and more_lse (batch, heads, rows)."""

    out: cute.Tensor
    lse: cute.Tensor
    more: cute.Tensor
    more_lse: cute.Tensor


class _Join(Program):
    @cute.jit
    def launch(self, x: States, cfg: cutlass.Constexpr[Config], stream):
        rows = x.out.shape[0] * x.out.shape[1] * x.out.shape[2]
        self.kernel(x, rows, cfg).launch(
            grid=(cute.ceil_div(rows, cfg.rows), 1, 1), block=(_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, x: States, rows: Int32, cfg: cutlass.Constexpr[Config]):
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        lane, first = thread % cfg.lanes, block * cfg.rows + thread // cfg.lanes
        first_column = lane * _VECTOR
        held = [[cute.make_rmem_tensor(n, Float32) for n in (_VECTOR, _VECTOR, 2)] for _ in range(_IN_FLIGHT)]
        for i in cutlass.range_constexpr(_IN_FLIGHT):
            row = first + i * (_THREADS // cfg.lanes)
            if row < rows and first_column < cfg.head_dim_v:
                sequence, query, head = _place(x.out, row)
                values, others, lses = held[i]
                _read(values, x.out[sequence, query, head, None].iterator + first_column, cfg.out)
                _read(others, x.more[sequence, query, head, None].iterator + first_column, cfg.dtype)
                lses[0], lses[1] = x.lse[sequence, head, query], x.more_lse[sequence, head, query]
        cute.arch.sync_warp()  # all lanes of a row have its lse
        for i in cutlass.range_constexpr(_IN_FLIGHT):
            row = first + i * (_THREADS // cfg.lanes)
            if row < rows and first_column < cfg.head_dim_v:
                sequence, query, head = _place(x.out, row)
                values, others, lses = held[i]
                row_max = cute.arch.fmax(lses[0], lses[1])
                reference = Float32(cutlass.select_(row_max == -Float32.inf, Float32(0.0), row_max))
                weights = [cute.math.exp(lses[j] - reference) for j in range(2)]
                total = weights[0] + weights[1]
                factor = Float32(cutlass.select_(total == 0.0, Float32(0.0), 1.0 / total))
                share, other = weights[0] * factor, weights[1] * factor
                sums = [share * values[k] + other * others[k] for k in range(_VECTOR)]
                _write(x.out[sequence, query, head, None].iterator + first_column, sums, cfg.out)
                if lane == 0:
                    x.lse[sequence, head, query] = reference + cute.math.log(total)

    def stand_ins(self, cfg: Config) -> tuple:
        dtype, out = jit.dsl_dtype(cfg.dtype), jit.dsl_dtype(cfg.out)
        lse = jit.fake_tensor(Float32, 3, align=4)
        more_lse = jit.fake_tensor(Float32, 3, contiguous=True, align=4)
        return (States(jit.fake_tensor(out, 4), lse, jit.fake_tensor(dtype, 4, contiguous=True), more_lse),)


def _place(x: cute.Tensor, row: Int32) -> tuple[Int32, Int32, Int32]:
    """Sequence, query and head of the so manieth row of (batch, rows, heads, dim)."""
    heads, queries = x.shape[2], x.shape[1]
    return row // heads // queries, row // heads % queries, row % heads


def _read(here: cute.Tensor, pointer: cute.Pointer, dtype: torch.dtype) -> None:
    """A lane's columns of a row."""
    pointer = pointer.align(16)
    if dtype == torch.float32:
        values = [*load_floats(pointer, 4), *load_floats(pointer + 4, 4)]
    else:
        values = load_halves(pointer, jit.dsl_dtype(dtype))
    for k, value in enumerate(values):
        here[k] = value


def _write(pointer: cute.Pointer, values: list[Float32], dtype: torch.dtype) -> None:
    pointer = pointer.align(16)
    if dtype == torch.float32:
        store_vec(pointer, [bits(x) for x in values[:4]])
        store_vec(pointer + 4, [bits(x) for x in values[4:]])
    else:
        words = [pack_half(values[k], values[k + 1], jit.dsl_dtype(dtype)) for k in range(0, _VECTOR, 2)]
        store_vec(pointer, words)


_JOIN = _Join("join_states")


def takes(more: torch.Tensor) -> bool:
    """Whether the kernel joins such outputs: there are some, of 16 bits, and their rows are whole vectors."""
    head_dim_v = more.shape[-1]
    fits = head_dim_v % _VECTOR == 0 and head_dim_v <= 32 * _VECTOR
    return fits and more.dtype in (torch.float16, torch.bfloat16) and more.numel() > 0


def launcher(cfg: Config, chip: Chip) -> jit.Launcher:
    """What takes `States`."""
    return _JOIN.launcher(cfg, chip)
