"""Kernel that sets padding rows: rows that no sequence uses.

Only the device knows them: varlen rows past the last entry of cu_seqlens, and each sequence's rows past seqused. Most
batches have few or none, so filling whole tensors would take much longer than finding them.

Each group of CTAs has one range of rows: with seqused, the padding rows at the end of each sequence; for varlen, the
last group has the rows past the last sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..runtime import jit
from .padding import THREADS, PaddingRowsConfig
from .program import Program
from .vec_io import store_vec

_VECTOR = 16  # bytes


class PaddingRows(NamedTuple):
    """Row-major tensors to set. matrices: (batch, rows, heads, dim), set to 0. rows: (batch, heads, rows) or (parts,
    batch, heads, rows), set to the fill value. Varlen tensors have no batch axis."""

    matrices: tuple[cute.Tensor, ...] | None
    rows: cute.Tensor  # this and the next two: None if absent
    cu_seqlens: cute.Tensor
    seqused: cute.Tensor

    @property
    def all_matrices(self) -> tuple[cute.Tensor, ...]:
        return self.matrices or ()


class _Clear(Program[PaddingRowsConfig]):
    @cute.jit
    def launch(self, padding_rows: PaddingRows, blocks: Int32, cfg: cutlass.Constexpr[PaddingRowsConfig], stream):
        """blocks: CTAs per group."""
        groups = Int32(1)
        if const_expr(cfg.has_seqused):
            groups = padding_rows.seqused.shape[0] + int(cfg.varlen)
        self.kernel(padding_rows, cfg).launch(grid=(groups, blocks, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, padding_rows: PaddingRows, cfg: cutlass.Constexpr[PaddingRowsConfig]):
        group, block, _ = cute.arch.block_idx()
        blocks = cute.arch.grid_dim()[1]
        begin = block * THREADS + cute.arch.thread_idx()[0]
        step = blocks * THREADS
        batch, first, last = self.range_of(padding_rows, group, cfg)
        for x in padding_rows.all_matrices:
            per_vector = _VECTOR // cfg.dtype.itemsize
            width = x.shape[-2] * x.shape[-1] // per_vector
            before = first if const_expr(cfg.varlen) else batch * x.shape[1] + first
            target = x.iterator + Int64(before) * width * per_vector
            for i in cutlass.range(begin, (last - first) * width, step):
                store_vec((target + Int64(i) * per_vector).align(_VECTOR), [Int32(0)] * 4)
        if const_expr(padding_rows.rows is not None):
            rows = padding_rows.rows
            heads, extent = rows.shape[-2], rows.shape[-1]
            part_stride = heads * extent
            if const_expr(not cfg.varlen):
                part_stride = part_stride * rows.shape[-3]
            part_heads = heads * (rows.shape[0] if const_expr(cfg.leading) else 1)
            for i in cutlass.range(begin, (last - first) * part_heads, step):
                part_head, row = i // (last - first), i % (last - first)
                in_part = Int64(batch * heads + part_head % heads) * extent + first + row
                index = Int64(part_head // heads) * part_stride + in_part
                (rows.iterator + index).store(Float32(cfg.fill))

    @cute.jit
    def range_of(self, padding_rows: PaddingRows, group: Int32, cfg: cutlass.Constexpr[PaddingRowsConfig]):
        """Return the sequence (0 if varlen), and the first and one past the last of its padding rows."""
        extent = (
            padding_rows.rows.shape[-1]
            if const_expr(padding_rows.rows is not None)
            else padding_rows.all_matrices[0].shape[-3]
        )
        if const_expr(not cfg.varlen):
            return group, Int32(padding_rows.seqused[group]), Int32(extent)
        sequences = padding_rows.cu_seqlens.shape[0] - 1
        first, last = Int32(padding_rows.cu_seqlens[sequences]), Int32(extent)
        if const_expr(cfg.has_seqused):  # noqa: SIM102  the outer one is decided at compile time
            if group < sequences:
                first, last = (
                    padding_rows.cu_seqlens[group] + padding_rows.seqused[group],
                    Int32(padding_rows.cu_seqlens[group + 1]),
                )
        return Int32(0), first, last

    def fake_args(self, cfg: PaddingRowsConfig) -> tuple:
        rank = 3 if cfg.varlen else 4
        dtype = jit.dsl_dtype(cfg.dtype)
        matrices = tuple(jit.fake_tensor(dtype, rank, contiguous=True) for _ in range(cfg.matrices))
        rows = None
        if cfg.leading is not None:
            rows = jit.fake_tensor(Float32, rank - 1 + cfg.leading, contiguous=True, align=4)
        present = cfg.varlen, cfg.has_seqused
        lengths = (jit.fake_tensor(Int32, 1, align=4) if exists else None for exists in present)
        return PaddingRows(matrices or None, rows, *lengths), Int32(1)


KERNEL = _Clear("idle_rows")
