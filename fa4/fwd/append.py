"""New keys and values into their rows of a cache, rotated, and q rotated: one small kernel before attention.

A warp takes one head of one row: of q first, then of the new keys and, with it, of the new values. Rotary embedding
turns the pair of columns (a, b) at position p by the angle of p: (a cos - b sin, a sin + b cos), in float32. What goes
to a cache of 8-bit numbers is divided by its descale, rounded, and limited to what these can be. Positions, rows and
pages are read on the device. Rows that the cache has no room for are left out; page numbers, indices and positions
beyond what there is are cut to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Uint8

from .. import jit
from ..core.program import Program
from ..device import Chip

_WARP, _WARPS = 32, 8


@dataclass(frozen=True, slots=True)
class Config:
    """rotary: dtype of cos and sin, or None. bytes_dtype: one of `spec.BYTES` that caches hold, which
    then come as bytes; None where they hold `dtype`.
    See `kvcache.record.Appended` for the rest."""

    dtype: torch.dtype
    rotary: torch.dtype | None
    varlen_q: bool
    varlen_k: bool
    page_size: int | None
    has_batch_idx: bool
    has_rotary_seqlens: bool
    interleaved: bool
    same_position: bool
    bytes_dtype: torch.dtype | None

    @property
    def has_bytes(self) -> bool:
        return self.bytes_dtype is not None


class Tensors(NamedTuple):
    """Those of `kvcache.record.Appended` and the results: `turned` like q, `seqlens` (batch,)."""

    q: cute.Tensor | None
    turned: cute.Tensor | None
    k: cute.Tensor
    v: cute.Tensor
    k_cache: cute.Tensor
    v_cache: cute.Tensor
    cache_seqlens: cute.Tensor
    seqlens: cute.Tensor
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor | None
    cos: cute.Tensor | None
    sin: cute.Tensor | None
    rotary_seqlens: cute.Tensor | None
    page_table: cute.Tensor | None
    batch_idx: cute.Tensor | None
    k_descale: cute.Tensor | None
    v_descale: cute.Tensor | None

    @property
    def capacity(self) -> Int32:
        """Rows that a sequence has room for."""
        if self.page_table is None:
            return self.k_cache.shape[1]
        return self.page_table.shape[1] * self.k_cache.shape[1]

    def position(self, sequence: Int32) -> Int32:
        """Of the first new row, as rotation counts."""
        return (self.cache_seqlens if self.rotary_seqlens is None else self.rotary_seqlens)[sequence]


class _Append(Program):
    @cute.jit
    def launch(self, x: Tensors, cfg: cutlass.Constexpr[Config], stream):
        items = _rows(x.k) * x.k.shape[-2]
        if cutlass.const_expr(cfg.rotary is not None):
            items += _rows(x.q) * x.q.shape[-2]
        # At least one block, for the lengths.
        blocks = cutlass.max(cute.ceil_div(items, _WARPS), 1)
        self.kernel(x, cfg).launch(grid=(blocks, 1, 1), block=(_WARP * _WARPS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: Tensors, cfg: cutlass.Constexpr[Config]):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        item, lane = block * _WARPS + thread // _WARP, thread % _WARP
        of_queries = Int32(0)
        if cutlass.const_expr(cfg.rotary is not None):
            of_queries = _rows(x.q) * x.q.shape[-2]
            if item < of_queries:
                self.rotate_query(x, item // x.q.shape[-2], item % x.q.shape[-2], lane, cfg)
        heads = x.k.shape[-2]
        own = item - of_queries
        if own >= 0 and own < _rows(x.k) * heads:
            self.append(x, own // heads, own % heads, lane, cfg)
        if block == 0:
            for b in cutlass.range(thread, cute.size(x.seqlens), _WARP * _WARPS):
                count = x.k.shape[1]
                if cutlass.const_expr(cfg.varlen_k):
                    count = x.cu_seqlens_k[b + 1] - x.cu_seqlens_k[b]
                x.seqlens[b] = cutlass.min(x.cache_seqlens[b] + count, x.capacity)

    @cute.jit
    def rotate_query(self, x, row, head, lane, cfg: cutlass.Constexpr):
        sequence, step, exists = _place(x.q, x.cu_seqlens_q, row)
        position = x.position(sequence)
        if cutlass.const_expr(not cfg.same_position):
            position += step
        source, target = (_line(tensor, x.cu_seqlens_q, sequence, step, row, head) for tensor in (x.q, x.turned))
        if exists:
            rotate(source, target, x.cos, x.sin, position, lane, cfg.interleaved, None, None)
        else:
            copy(source, target, lane, None, None)

    @cute.jit
    def append(self, x, row, head, lane, cfg: cutlass.Constexpr):
        sequence, step, exists = _place(x.k, x.cu_seqlens_k, row)
        place = x.cache_seqlens[sequence] + step
        if exists and place >= 0 and place < x.capacity:
            first, second = sequence, place
            if cutlass.const_expr(cfg.page_size is not None):
                first, second = x.page_table[sequence, place // cfg.page_size], place % cfg.page_size
            if cutlass.const_expr(cfg.has_batch_idx):
                first = x.batch_idx[sequence]
            first = cutlass.max(cutlass.min(first, x.k_cache.shape[0] - 1), 0)
            k, v = (_line(tensor, x.cu_seqlens_k, sequence, step, row, head) for tensor in (x.k, x.v))
            to_k, to_v = (cache[(first, second, head, None)] for cache in (x.k_cache, x.v_cache))
            of_k = x.k_descale[sequence, head] if cutlass.const_expr(cfg.has_bytes) else None
            of_v = x.v_descale[sequence, head] if cutlass.const_expr(cfg.has_bytes) else None
            if cutlass.const_expr(cfg.rotary is not None):
                rotate(k, to_k, x.cos, x.sin, x.position(sequence) + step, lane, cfg.interleaved, cfg.bytes_dtype, of_k)
            else:
                copy(k, to_k, lane, cfg.bytes_dtype, of_k)
            copy(v, to_v, lane, cfg.bytes_dtype, of_v)

    def stand_ins(self, cfg: Config) -> tuple:
        dtype = jit.dsl_dtype(cfg.dtype)

        def matrices(varlen: bool) -> cute.Tensor:
            return jit.fake_tensor(dtype, 3 if varlen else 4, align=2)

        def cache() -> cute.Tensor:
            return jit.fake_tensor(Uint8, 4, align=1) if cfg.has_bytes else matrices(False)

        def descale() -> cute.Tensor | None:
            return jit.fake_tensor(Float32, 2, align=4) if cfg.has_bytes else None

        def numbers(there: bool, rank: int = 1) -> cute.Tensor | None:
            return jit.fake_tensor(Int32, rank, align=4) if there else None

        has_rotary = cfg.rotary is not None
        angles = [jit.fake_tensor(jit.dsl_dtype(cfg.rotary), 2, align=2) if has_rotary else None for _ in range(2)]
        queries = [matrices(cfg.varlen_q) if has_rotary else None for _ in range(2)]
        tensors = Tensors(
            *queries, *(matrices(cfg.varlen_k) for _ in range(2)), cache(), cache(), numbers(True),
            numbers(True), numbers(has_rotary and cfg.varlen_q), numbers(cfg.varlen_k), *angles,
            numbers(cfg.has_rotary_seqlens), numbers(cfg.page_size is not None, 2), numbers(cfg.has_batch_idx),
            descale(), descale(),
        )  # fmt: skip
        return (tensors,)


def _rows(x: cute.Tensor) -> Int32:
    """Of all sequences."""
    return x.shape[0] if cute.rank(x) == 3 else x.shape[0] * x.shape[1]


def _line(x: cute.Tensor, cu_seqlens: cute.Tensor | None, sequence: Int32, step: Int32, row: Int32, head: Int32):
    """One head's columns in a row of a packed or dense tensor."""
    return x[(sequence, step, head, None)] if cu_seqlens is None else x[(row, head, None)]


def _place(x: cute.Tensor, cu_seqlens: cute.Tensor | None, row: Int32) -> tuple[Int32, Int32, Boolean]:
    """A row's sequence, its number there, and whether a sequence has it."""
    if cu_seqlens is None:
        return row // x.shape[1], row % x.shape[1], Boolean(True)
    sequence = _sequence_of(cu_seqlens, row)
    return sequence, row - cu_seqlens[sequence], row < cu_seqlens[cute.size(cu_seqlens) - 1]


@cute.jit
def _sequence_of(cu_seqlens: cute.Tensor, row: Int32):
    """The last sequence that begins at `row` or before."""
    found, stop = Int32(0), Int32(cute.size(cu_seqlens)) - 1
    while stop - found > 1:
        middle = (found + stop) // 2
        is_after = cu_seqlens[middle] > row
        found = Int32(cutlass.select_(is_after, found, middle))
        stop = Int32(cutlass.select_(is_after, middle, stop))
    return found


@cute.jit
def rotate(x, to, cos, sin, position, lane, interleaved: cutlass.Constexpr[bool], kind: cutlass.Constexpr, descale):
    """A row, its first 2 * cos.shape[1] columns turned by the angles of a position."""
    half = cos.shape[1]
    at = cutlass.max(cutlass.min(position, cos.shape[0] - 1), 0)
    for column in cutlass.range(lane, cute.size(x), _WARP):
        value = Float32(x[column])
        if column < 2 * half:
            is_second = column % 2 if cutlass.const_expr(interleaved) else Int32(column >= half)
            pair = column // 2 if cutlass.const_expr(interleaved) else column - half * is_second
            apart = 1 if cutlass.const_expr(interleaved) else half
            other = Float32(x[column + apart - 2 * apart * is_second])
            other = Float32(cutlass.select_(Boolean(is_second != 0), other, -other))
            value = value * Float32(cos[at, pair]) + other * Float32(sin[at, pair])
        put(to, column, value.to(x.element_type), kind, descale)


@cute.jit
def copy(x, to, lane, kind: cutlass.Constexpr, descale):
    for column in cutlass.range(lane, cute.size(x), _WARP):
        put(to, column, x[column], kind, descale)


def put(to: cute.Tensor, column: Int32, value, kind: torch.dtype | None, descale: Float32 | None) -> None:
    """A number of a row; of a `kind` of 8 bits the nearest to it over the descale, or the largest there is."""
    if kind is None or descale is None:
        to[column] = value
        return
    code = cute.arch.inline_ptx(
        _TO_INT8 if kind == torch.int8 else _TO_E4M3,
        write_only_types=[Int32],
        read_only_args=[Float32(value) / descale],
    )
    to[column] = code.to(Uint8)


_TO_E4M3 = """{
.reg .b16 pair;
cvt.rn.satfinite.e4m3x2.f32 pair, {$r0}, {$r0};
cvt.u32.u16 {$w0}, pair;
}"""
_TO_INT8 = """{
cvt.rni.s32.f32 {$w0}, {$r0};
max.s32 {$w0}, {$w0}, -128;
min.s32 {$w0}, {$w0}, 127;
}"""


_APPEND = _Append("append")


def launcher(cfg: Config, chip: Chip) -> jit.Launcher:
    """What takes `Tensors`."""
    return _APPEND.launcher(cfg, chip)
