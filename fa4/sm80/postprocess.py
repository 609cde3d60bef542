"""After the backward's main kernel: the float32 sum of dQ becomes dq, scaled and in the inputs' dtype."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from .. import jit
from ..core.heads import PackedRows
from ..core.seqlen import Rows, align_strides, padded_first, sequence_of
from ..device import Chip
from .loader import TileCopy, plain_copy, thread_tiling
from .tensor_core import smem_layout, tiled_mma
from .tiles import BackwardTiles, padded


@dataclass(frozen=True)
class Postprocess:
    """What the generated code depends on, and so the compile key; the same tiles as the main kernel's."""

    dtype: torch.dtype
    head_dim: int
    tiles: BackwardTiles
    group: int
    varlen: bool
    has_seqused_q: bool

    def compile(self, chip: Chip):
        """Compile the launcher, whose arguments are those of `__call__` without the stream."""
        return jit.compile_kernel(
            self,
            jit.fake_tensor(Float32, 3),
            jit.fake_tensor(jit.dsl_dtype(self.dtype), 3 if self.varlen else 4),
            jit.fake_tensor(Int32, 1, align=4) if self.varlen else None,
            jit.fake_tensor(Int32, 1, align=4) if self.has_seqused_q else None,
            *(Int32(0), Int32(0), Float32(0)),
            jit.current_stream(),
            chip=chip,
        )

    @cute.jit
    def __call__(
        self,
        total: cute.Tensor,
        dq: cute.Tensor,
        cu_seqlens_q: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        batch: Int32,
        max_seqlen_q: Int32,
        scale: Float32,
        stream,
    ):
        dq = align_strides(dq)
        m_blocks = cute.ceil_div(max_seqlen_q * self.group, self.tiles.tile_m)
        heads = total.shape[0]
        self.kernel(total, dq, cu_seqlens_q, seqused_q, m_blocks, heads, scale).launch(
            grid=[m_blocks * heads * batch, 1, 1],
            block=[32 * self.tiles.warps, 1, 1],
            smem=2 * self.tiles.tile_m * padded(self.head_dim),
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        total: cute.Tensor,
        dq: cute.Tensor,
        cu_seqlens_q: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        m_blocks: Int32,
        heads: Int32,
        scale: Float32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        m_block = tile % m_blocks
        head = tile // m_blocks % heads
        sequence = tile // m_blocks // heads
        extent = dq.shape[0 if cutlass.const_expr(self.varlen) else 1]
        rows = Rows.of(sequence, extent, cu_seqlens_q, seqused_q)
        first = padded_first(sequence, rows, extent, self.group, self.tiles.tile_m, self.varlen)
        start = total.iterator + cute.crd2idx((head, first + m_block * self.tiles.tile_m, 0), total.layout)
        packed = PackedRows(head * self.group, rows.count, self.group)
        run = partial(self.tile, packed, sequence_of(dq, sequence, rows, self.varlen), thread)
        if m_block * self.tiles.tile_m < rows.count * self.group:
            run(start + thread, m_block, scale)

    @cute.jit
    def tile(self, packed, dq, thread, start, m_block, scale):
        m, dim, threads = self.tiles.tile_m, padded(self.head_dim), 32 * self.tiles.warps
        element = jit.dsl_dtype(self.dtype)
        mma = tiled_mma(element, *self.tiles.warps_q)
        acc = cute.make_rmem_tensor(mma.get_slice(thread).partition_shape_C((m, dim)), Float32)
        for i in cutlass.range_constexpr(cute.size(acc)):
            acc[i] = cute.make_tensor(start + i * threads, cute.make_layout(1))[0]
        half = cute.make_fragment_like(acc, element)
        half.store((acc.load() * scale).to(element))
        s_dq = SmemAllocator().allocate_tensor(element, smem_layout(m, dim), 1024)
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), element, num_bits_per_copy=32)
        to_smem = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        cute.copy(to_smem, to_smem.retile(half), to_smem.partition_D(s_dq))
        cute.arch.barrier()
        copy = thread_tiling(plain_copy(element), threads, dim)
        TileCopy(copy, thread, m, dim, self.head_dim).store_rows(s_dq, lambda r: packed.address(dq, m_block * m + r))
