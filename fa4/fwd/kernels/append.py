"""Append kernel: write new keys and values into a KV cache and apply rotary embedding to k and q, before attention.

A warp processes one head of one row: first the rows of q, then the new rows of k and v together. Rotary embedding
rotates the pair of columns (a, b) at position p by the angle of p: (a cos - b sin, a sin + b cos), in float32. For an
8-bit cache, values are divided by the descale, or by the factor that goes into a row of `scaled_rows`, rounded and
saturated; for one of `nvfp4`, by the scale of their 16 columns. The kernel reads positions, rows and pages on the
device. It skips rows past the capacity of the cache. It clamps page numbers, batch indices and positions to the valid
range.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Uint8, const_expr

from ...core.program import Program
from ...core.sequence import sequence_of
from ...core.vec_io import bits, rounded
from ...runtime import jit, nvfp4, scaled_rows
from ..launchers import AppendConfig

_WARP, _WARPS = 32, 8


class AppendTensors(NamedTuple):
    """Tensors of `kvcache.record.AppendArguments`, and the results: `rotated` (like q) and `seqlens`, (batch,)
    int32."""

    q: cute.Tensor  # or None
    rotated: cute.Tensor | None
    k: cute.Tensor
    v: cute.Tensor
    k_cache: cute.Tensor
    v_cache: cute.Tensor
    cache_seqlens: cute.Tensor
    seqlens: cute.Tensor
    cu_seqlens_q: cute.Tensor | None
    cu_seqlens_k: cute.Tensor  # or None
    cos: cute.Tensor | None
    sin: cute.Tensor | None
    rotary_seqlens: cute.Tensor | None
    page_table: cute.Tensor  # or None
    batch_idx: cute.Tensor  # or None
    k_descale: cute.Tensor  # or None; of `nvfp4` the scales
    v_descale: cute.Tensor  # or None

    @property
    def capacity(self) -> Int32:
        """Number of rows that the cache can hold for one sequence."""
        if self.page_table is None:
            return self.k_cache.shape[1]
        return self.page_table.shape[1] * self.k_cache.shape[1]

    def position(self, sequence: Int32) -> Int32:
        """Rotary position of the first new row of a sequence."""
        return (self.cache_seqlens if self.rotary_seqlens is None else self.rotary_seqlens)[sequence]


class _Append(Program[AppendConfig]):
    @cute.jit
    def launch(self, x: AppendTensors, cfg: cutlass.Constexpr[AppendConfig], stream):
        items = _rows(x.k) * x.k.shape[-2]
        if const_expr(cfg.rotary is not None):
            items += _rows(x.q) * x.q.shape[-2]
        # At least one block: it writes `seqlens`.
        blocks = cutlass.max(cute.ceil_div(items, _WARPS), 1)
        self.kernel(x, cfg).launch(grid=(blocks, 1, 1), block=(_WARP * _WARPS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: AppendTensors, cfg: cutlass.Constexpr[AppendConfig]):
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        work_item, lane = block * _WARPS + thread // _WARP, thread % _WARP
        q_items = Int32(0)
        if const_expr(cfg.rotary is not None):
            q_items = _rows(x.q) * x.q.shape[-2]
            if work_item < q_items:
                self.rotate_query(x, work_item // x.q.shape[-2], work_item % x.q.shape[-2], lane, cfg)
        heads = x.k.shape[-2]
        kv_item = work_item - q_items
        if kv_item >= 0 and kv_item < _rows(x.k) * heads:
            self.append(x, kv_item // heads, kv_item % heads, lane, cfg)
        if block == 0:
            for b in cutlass.range(thread, cute.size(x.seqlens), _WARP * _WARPS):
                count = x.k.shape[1]
                if const_expr(cfg.varlen_k):
                    count = x.cu_seqlens_k[b + 1] - x.cu_seqlens_k[b]
                x.seqlens[b] = cutlass.min(x.cache_seqlens[b] + count, x.capacity)

    @cute.jit
    def rotate_query(
        self, x: AppendTensors, row: Int32, head: Int32, lane: Int32, cfg: cutlass.Constexpr[AppendConfig]
    ):
        sequence, step, exists = _row_coord(x.q, x.cu_seqlens_q, row)
        position = x.position(sequence)
        if const_expr(not cfg.same_position):
            position += step
        source, target = (_head_row(tensor, x.cu_seqlens_q, sequence, step, row, head) for tensor in (x.q, x.rotated))
        if exists:
            rotate(source, target, x.cos, x.sin, position, lane, cfg.interleaved, None, None)
        else:
            copy(source, target, lane, None, None)

    @cute.jit
    def append(self, x: AppendTensors, row: Int32, head: Int32, lane: Int32, cfg: cutlass.Constexpr[AppendConfig]):
        seq, step, exists = _row_coord(x.k, x.cu_seqlens_k, row)
        cache_row = x.cache_seqlens[seq] + step
        if exists and cache_row >= 0 and cache_row < x.capacity:
            page, slot = seq, cache_row
            if const_expr(cfg.page_size is not None):
                page, slot = x.page_table[seq, cache_row // cfg.page_size], cache_row % cfg.page_size
            if const_expr(cfg.has_batch_idx):
                page = x.batch_idx[seq]
            page = cutlass.max(cutlass.min(page, x.k_cache.shape[0] - 1), 0)
            k, v = (_head_row(tensor, x.cu_seqlens_k, seq, step, row, head) for tensor in (x.k, x.v))
            to_k, to_v = (cache[(page, slot, head, None)] for cache in (x.k_cache, x.v_cache))
            has_factors = cfg.converts_kv and not cfg.is_nvfp4
            k_descale = x.k_descale[seq, head] if const_expr(has_factors) else None
            v_descale = x.v_descale[seq, head] if const_expr(has_factors) else None
            if const_expr(cfg.is_nvfp4):
                k_scales, v_scales = (scales[(page, slot, head, None)] for scales in (x.k_descale, x.v_descale))
                position = x.position(seq) + step if const_expr(cfg.rotary is not None) else None
                put_nvfp4_row(k, to_k, k_scales, lane, x.cos, x.sin, position, cfg.interleaved)
                put_nvfp4_row(v, to_v, v_scales, lane, None, None, None, cfg.interleaved)
            elif const_expr(cfg.has_scaled_rows):
                put_scaled_row(k, to_k, lane)
            elif const_expr(cfg.rotary is not None):
                rotate(
                    k, to_k, x.cos, x.sin, x.position(seq) + step, lane, cfg.interleaved, cfg.converted_dtype, k_descale
                )
            else:
                copy(k, to_k, lane, cfg.converted_dtype, k_descale)
            if const_expr(not (cfg.has_scaled_rows or cfg.is_nvfp4)):
                copy(v, to_v, lane, cfg.converted_dtype, v_descale)

    def fake_args(self, cfg: AppendConfig) -> tuple:
        dtype, has_rotary = jit.dsl_dtype(cfg.dtype), cfg.rotary is not None
        cache_dtype, cache_align = (Uint8, 1) if cfg.converts_kv else (dtype, 2)
        rotary_dtype = jit.dsl_dtype(cfg.rotary) if has_rotary else None

        def fake(kind: Any, rank: int, align: int = 2, exists: bool = True) -> cute.Tensor | None:
            return jit.fake_tensor(kind, rank, align=align) if exists else None

        def fake_ints(exists: bool, rank: int = 1) -> cute.Tensor | None:
            return fake(Int32, rank, 4, exists)

        q, rotated = (fake(dtype, 3 if cfg.varlen_q else 4, exists=has_rotary) for _ in range(2))
        k, v = (fake(dtype, 3 if cfg.varlen_k else 4) for _ in range(2))
        k_cache, v_cache = (fake(cache_dtype, 4, cache_align) for _ in range(2))
        cos, sin = (fake(rotary_dtype, 2, exists=has_rotary) for _ in range(2))
        kind, rank, align = (Uint8, 4, 1) if cfg.is_nvfp4 else (Float32, 2, 4)
        k_descale, v_descale = (fake(kind, rank, align, cfg.converts_kv) for _ in range(2))
        tensors = AppendTensors(
            q, rotated, k, v, k_cache, v_cache, fake_ints(True), fake_ints(True),
            fake_ints(has_rotary and cfg.varlen_q), fake_ints(cfg.varlen_k), cos, sin,
            fake_ints(cfg.has_rotary_seqlens), fake_ints(cfg.page_size is not None, 2), fake_ints(cfg.has_batch_idx),
            k_descale, v_descale,
        )  # fmt: skip
        return (tensors,)


def _rows(x: cute.Tensor) -> Int32:
    """Number of rows over all sequences."""
    return x.shape[0] if cute.rank(x) == 3 else x.shape[0] * x.shape[1]


def _head_row(x: cute.Tensor, cu_seqlens: cute.Tensor | None, sequence: Int32, step: Int32, row: Int32, head: Int32):
    """Columns of one head in one row of a packed or dense tensor."""
    return x[(sequence, step, head, None)] if cu_seqlens is None else x[(row, head, None)]


def _row_coord(x: cute.Tensor, cu_seqlens: cute.Tensor | None, row: Int32) -> tuple[Int32, Int32, Boolean]:
    """(sequence, row in the sequence, True if a sequence has the row)."""
    if cu_seqlens is None:
        return row // x.shape[1], row % x.shape[1], Boolean(True)
    sequence = sequence_of(cu_seqlens, row)
    return sequence, row - cu_seqlens[sequence], row < cu_seqlens[cute.size(cu_seqlens) - 1]


@cute.jit
def rotate(x, to, cos, sin, position, lane, interleaved: cutlass.Constexpr[bool], dtype: cutlass.Constexpr, descale):
    """Copy a row of x to `to`, with its first 2 * cos.shape[1] columns rotated by the angles of `position`."""
    angle_row = cutlass.max(cutlass.min(position, cos.shape[0] - 1), 0)
    for column in cutlass.range(lane, cute.size(x), _WARP):
        value = rotated(x, cos, sin, angle_row, column, interleaved)
        put(to, column, value.to(x.element_type), dtype, descale)


@cute.jit
def rotated(x, cos, sin, angle_row, column, interleaved: cutlass.Constexpr[bool]):
    """Return a column of x, rotated if it is one of the first 2 * cos.shape[1]."""
    half = cos.shape[1]
    value = Float32(x[column])
    if column < 2 * half:
        is_second = column % 2 if const_expr(interleaved) else Int32(column >= half)
        pair = column // 2 if const_expr(interleaved) else column - half * is_second
        distance = 1 if const_expr(interleaved) else half
        partner = Float32(x[column + distance - 2 * distance * is_second])
        partner = Float32(cutlass.select_(Boolean(is_second != 0), partner, -partner))
        value = value * Float32(cos[angle_row, pair]) + partner * Float32(sin[angle_row, pair])
    return value


@cute.jit
def copy(x, to, lane, dtype: cutlass.Constexpr, descale):
    for column in cutlass.range(lane, cute.size(x), _WARP):
        put(to, column, x[column], dtype, descale)


def put(to: cute.Tensor, column: Int32, value, dtype: torch.dtype | None, descale: Float32 | None) -> None:
    """Store one value. With an 8-bit dtype, store value / descale, rounded to nearest and saturated."""
    if dtype is None or descale is None:
        to[column] = value
        return
    code = cute.arch.inline_ptx(
        _TO_INT8 if dtype == torch.int8 else _TO_E4M3,
        write_only_types=[Int32],
        read_only_args=[Float32(value) / descale],
    )
    to[column] = code.to(Uint8)


@cute.jit
def put_scaled_row(k, to, lane):
    """Whole warp: store a row of `scaled_rows`."""
    each = scaled_rows.TILE // _WARP  # columns of a tile per lane
    for tile in cutlass.range_constexpr(scaled_rows.LATENT // scaled_rows.TILE):
        first = tile * scaled_rows.TILE + lane * each
        values = [Float32(k[first + i]) for i in range(each)]
        largest = Float32(0.0)
        for value in values:
            largest = cute.arch.fmax(largest, cute.arch.fmax(value, -value))
        largest = cute.arch.warp_reduction_max(largest)
        factor = cute.arch.fmax(largest / scaled_rows.LARGEST, Float32(scaled_rows.SMALLEST_FACTOR))
        for i in cutlass.range_constexpr(each):
            put(to, first + i, values[i], torch.float8_e4m3fn, factor)
        if lane < 4:
            to[scaled_rows.FACTORS + 4 * tile + lane] = (bits(factor) >> (8 * lane)).to(Uint8)
    for i in cutlass.range_constexpr(2 * scaled_rows.ROPE // _WARP):
        byte = i * _WARP + lane
        code = bits(Float32(k[scaled_rows.LATENT + byte // 2])) >> (16 + byte % 2 * 8)  # bfloat16: the upper half
        to[scaled_rows.ROTATED + byte] = code.to(Uint8)


@cute.jit
def put_nvfp4_row(x, to, scales, lane, cos, sin, position, interleaved: cutlass.Constexpr[bool]):
    """Whole warp: store a row of `nvfp4` and its scales, rotated if there is a position. A lane has two columns."""
    angle_row = 0
    if const_expr(position is not None):
        angle_row = cutlass.max(cutlass.min(position, cos.shape[0] - 1), 0)
    columns = cute.size(x)
    for first in cutlass.range(0, columns, 2 * _WARP):
        column = first + 2 * lane
        is_in = column < columns
        values = []
        for i in cutlass.range_constexpr(2):
            at = cutlass.min(column, columns - 2) + i
            value = Float32(x[at])
            if const_expr(position is not None):
                value = Float32(rotated(x, cos, sin, angle_row, at, interleaved).to(x.element_type))
            values.append(value)
        code, scale = nvfp4_codes(values)
        if is_in:
            to[column // nvfp4.PER_BYTE] = code.to(Uint8)
            if lane % _LANES_OF_SCALE == 0:
                scales[column // nvfp4.COLUMNS] = scale.to(Uint8)


def nvfp4_codes(values: list[Float32]) -> tuple[Int32, Int32]:
    """Return the byte of two columns, and their e4m3 scale, as `nvfp4.quantised`. Eight lanes share a scale."""
    magnitudes = [cute.arch.fmax(x, -x) for x in values]
    magnitudes = [Float32(cutlass.select_(x == x, x, Float32.inf)) for x in magnitudes]
    largest = cute.arch.fmax(*magnitudes)
    for distance in (1, 2, 4):
        largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, offset=distance))
    scale = cute.arch.fmin(largest / nvfp4.LARGEST, Float32(nvfp4.LARGEST_SCALE))
    scale = cute.arch.fmax(scale, Float32(nvfp4.SMALLEST_SCALE))
    code = cute.arch.inline_ptx(_TO_E4M3, write_only_types=[Int32], read_only_args=[scale]) & 0xFF
    is_finite = Boolean(largest < Float32.inf)
    code = Int32(cutlass.select_(is_finite, code, Int32(_NAN_E4M3)))
    scale = Float32(cutlass.select_(is_finite, rounded(scale, cutlass.Float8E4M3FN), Float32(float("nan"))))
    byte = Int32(0)
    for i, (value, magnitude) in enumerate(zip(values, magnitudes)):
        relative = magnitude / scale
        terms = [(relative > bound, 1) for bound in nvfp4.TIES_DOWN] + [
            (relative >= bound, 1) for bound in nvfp4.TIES_UP
        ]
        terms.append((value < 0.0, 8))
        number = sum((Int32(cutlass.select_(Boolean(holds), Int32(n), Int32(0))) for holds, n in terms), Int32(0))
        byte = byte | (number << (4 * i))
    return byte, code


_LANES_OF_SCALE = nvfp4.COLUMNS // 2  # of two columns each
_NAN_E4M3 = 0x7F
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


KERNEL = _Append("append")
