"""Rows that no sequence uses, set by a kernel that writes nothing else.

Only the device knows which they are: packed rows past the last of cu_seqlens, and of each sequence those past seqused.
In most batches there are few or none, so that a fill of whole tensors would take much longer than to look.

A group of blocks has one range of rows: the idle end of a sequence where there is seqused, and, after those of all
sequences, the packed rows past the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64

from .. import jit
from ..device import Chip
from .program import Program
from .vec_io import store_vec

_THREADS = 256
_VECTOR = 16  # bytes


@dataclass(frozen=True, slots=True)
class Config:
    """dtype: of the matrices. leading: axes of `rows` before those it has as lse; None if there are no rows. fill: what
    they get."""

    dtype: torch.dtype
    matrices: int
    leading: int | None
    fill: float
    varlen: bool
    has_seqused: bool


class PaddingRows(NamedTuple):
    """What there is to set, all of it row-major: `matrices` (batch, rows, heads, dim) to 0, `rows` (batch, heads, rows)
    or (parts, batch, heads, rows) to the fill; packed ones without the batch."""

    matrices: tuple[cute.Tensor, ...] | None
    rows: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    seqused: cute.Tensor | None

    @property
    def all_matrices(self) -> tuple[cute.Tensor, ...]:
        return self.matrices or ()


class _Clear(Program):
    @cute.jit
    def launch(self, padding_rows: PaddingRows, blocks: Int32, cfg: cutlass.Constexpr[Config], stream):
        """`blocks`: of a group."""
        groups = Int32(1)
        if cutlass.const_expr(cfg.has_seqused):
            groups = padding_rows.seqused.shape[0] + int(cfg.varlen)
        self.kernel(padding_rows, cfg).launch(grid=(groups, blocks, 1), block=(_THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, padding_rows: PaddingRows, cfg: cutlass.Constexpr[Config]):
        group, block, _ = cute.arch.block_idx()
        blocks = cute.arch.grid_dim()[1]
        begin = block * _THREADS + cute.arch.thread_idx()[0]
        step = blocks * _THREADS
        batch, first, last = self.range_of(padding_rows, group, cfg)
        for x in padding_rows.all_matrices:
            per_vector = _VECTOR // cfg.dtype.itemsize
            width = x.shape[-2] * x.shape[-1] // per_vector
            before = first if cutlass.const_expr(cfg.varlen) else batch * x.shape[1] + first
            target = x.iterator + Int64(before) * width * per_vector
            for i in cutlass.range(begin, (last - first) * width, step):
                store_vec((target + Int64(i) * per_vector).align(_VECTOR), [Int32(0)] * 4)
        if cutlass.const_expr(padding_rows.rows is not None):
            rows = padding_rows.rows
            heads, extent = rows.shape[-2], rows.shape[-1]
            of_part = heads * extent
            if cutlass.const_expr(not cfg.varlen):
                of_part = of_part * rows.shape[-3]
            lines = heads * (rows.shape[0] if cfg.leading else 1)
            for i in cutlass.range(begin, (last - first) * lines, step):
                line, step_in = i // (last - first), i % (last - first)
                in_part = Int64(batch * heads + line % heads) * extent + first + step_in
                place = Int64(line // heads) * of_part + in_part
                (rows.iterator + place).store(Float32(cfg.fill))

    @cute.jit
    def range_of(self, padding_rows: PaddingRows, group: Int32, cfg: cutlass.Constexpr[Config]):
        """The sequence, 0 if packed, and the first and last of its rows."""
        extent = padding_rows.rows.shape[-1] if padding_rows.rows is not None else padding_rows.matrices[0].shape[-3]
        if cutlass.const_expr(not cfg.varlen):
            return group, Int32(padding_rows.seqused[group]), Int32(extent)
        sequences = padding_rows.cu_seqlens.shape[0] - 1
        first, last = Int32(padding_rows.cu_seqlens[sequences]), Int32(extent)
        if cutlass.const_expr(cfg.has_seqused):  # noqa: SIM102  one is decided at compile time
            if group < sequences:
                first, last = (
                    padding_rows.cu_seqlens[group] + padding_rows.seqused[group],
                    Int32(padding_rows.cu_seqlens[group + 1]),
                )
        return Int32(0), first, last

    def stand_ins(self, cfg: Config) -> tuple:
        rank = 3 if cfg.varlen else 4
        dtype = jit.dsl_dtype(cfg.dtype)
        matrices = tuple(jit.fake_tensor(dtype, rank, contiguous=True) for _ in range(cfg.matrices))
        rows = None
        if cfg.leading is not None:
            rows = jit.fake_tensor(Float32, rank - 1 + cfg.leading, contiguous=True, align=4)
        present = cfg.varlen, cfg.has_seqused
        lengths = (jit.fake_tensor(Int32, 1, align=4) if there else None for there in present)
        return PaddingRows(matrices or None, rows, *lengths), Int32(1)


_CLEAR = _Clear("idle_rows")


def launcher(cfg: Config, chip: Chip) -> jit.Launcher:
    """What takes `PaddingRows` and the number of blocks of a group, see `blocks`."""
    return _CLEAR.launcher(cfg, chip)


def blocks(elements: int, groups: int, chip: Chip) -> int:
    """As many as keep a chip busy if nearly all of the `elements` are idle, and no more than could have work."""
    return max(1, min(8 * chip.sms // groups, elements // (_THREADS * 32)))
