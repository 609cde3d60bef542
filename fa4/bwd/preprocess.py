"""Before the backward's main kernel: row statistics, and zeros where the main kernel will add.

delta_i = sum_d dO_id O_id - dlse_i        so that dS_ij = P_ij (dP_ij - delta_i)
lse_log2_i = lse_i log2(e), or +inf for a row that saw nothing: exp2(s - inf) = 0 leaves it out of every gradient
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32

from .. import jit
from ..core.heads import PackedRows
from ..core.seqlen import Rows, align_strides, padded_first, sequence_of
from ..core.softmax import LOG2_E
from ..device import Chip

_THREADS = 128
_VECTOR = 8  # 16-bit elements in 16 bytes


@dataclass(frozen=True)
class Preprocess:
    """What the generated code depends on, and so the compile key. `padded_head_dim` is the row length of the dq sum;
    `has_delta_rows`: delta is also written in lse's layout, for the sink's gradient."""

    dtype: torch.dtype
    head_dim_v: int
    padded_head_dim: int
    tile_m: int
    group: int
    varlen: bool
    has_seqused_q: bool
    has_dlse: bool
    has_delta_rows: bool
    deterministic: bool

    @property
    def lanes(self) -> int:
        """Threads that share a row, 16 bytes of it each: a power of two, so that shuffles can sum over them."""
        return 1 << (-(-self.head_dim_v // _VECTOR) - 1).bit_length()

    def compile(self, chip: Chip):
        """Compile the launcher, whose arguments are those of `__call__` without the stream."""
        element = jit.dsl_dtype(self.dtype)
        rank = 3 if self.varlen else 4
        row_values = [jit.fake_tensor(Float32, rank - 1, align=4) for _ in range(3)]
        return jit.compile_kernel(
            self,
            jit.fake_tensor(element, rank),
            jit.fake_tensor(element, rank),
            row_values[0],
            row_values[1] if self.has_dlse else None,
            row_values[2] if self.has_delta_rows else None,
            jit.fake_tensor(Float32, 2),
            jit.fake_tensor(Float32, 2),
            jit.fake_tensor(Float32, 3),
            jit.fake_tensor(Int32, 2) if self.deterministic else None,
            jit.fake_tensor(Int32, 1, align=4) if self.varlen else None,
            jit.fake_tensor(Int32, 1, align=4) if self.has_seqused_q else None,
            Int32(0),
            Int32(0),
            jit.current_stream(),
            chip=chip,
        )

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        delta_rows: cute.Tensor | None,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq: cute.Tensor,
        turn: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        batch: Int32,
        max_seqlen_q: Int32,
        stream,
    ):
        m_blocks = cute.ceil_div(max_seqlen_q * self.group, self.tile_m)
        heads = lse_log2.shape[0]
        out, dout = align_strides(out), align_strides(dout)
        self.kernel(
            out, dout, lse, dlse, delta_rows, lse_log2, delta, dq, turn, cu_seqlens_q, seqused_q, m_blocks, heads
        ).launch(grid=[m_blocks * heads * batch, 1, 1], block=[_THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        delta_rows: cute.Tensor | None,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq: cute.Tensor,
        turn: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        m_blocks: Int32,
        heads: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        tile, _, _ = cute.arch.block_idx()
        m_block = tile % m_blocks
        head = tile // m_blocks % heads
        sequence = tile // m_blocks // heads
        extent = out.shape[0 if cutlass.const_expr(self.varlen) else 1]
        rows = Rows.of(sequence, extent, cu_seqlens_q, seqused_q)
        first = padded_first(sequence, rows, extent, self.group, self.tile_m, self.varlen) + m_block * self.tile_m
        out, dout = (sequence_of(x, sequence, rows, self.varlen) for x in (out, dout))
        lse, dlse, delta_rows = (self.rows_of(x, sequence, rows) for x in (lse, dlse, delta_rows))
        packed = PackedRows(head * self.group, rows.count, self.group)
        # Tiles past the end of a short sequence belong to the next one: leave them alone.
        if m_block * self.tile_m < rows.count * self.group:
            self.statistics(out, dout, lse, dlse, delta_rows, lse_log2, delta, packed, head, m_block, first, thread)
            zeros = cute.make_rmem_tensor(4, Float32)
            zeros.fill(0.0)
            start = dq.iterator + cute.crd2idx((head, first, 0), dq.layout)
            for i in cutlass.range_constexpr(self.tile_m * self.padded_head_dim // (4 * _THREADS)):
                target = (start + (i * _THREADS + thread) * 4).align(16)
                cute.autovec_copy(zeros, cute.make_tensor(target, cute.make_layout(4)))
            if cutlass.const_expr(self.deterministic):  # noqa: SIM102  one is decided at compile time
                if thread == 0:
                    turn[head, first // self.tile_m] = Int32(0)

    def rows_of(self, x: cute.Tensor | None, sequence: Int32, rows: Rows) -> cute.Tensor | None:
        """(heads, rows) of one sequence, from lse's layout."""
        if x is None:
            return None
        return cute.domain_offset((0, rows.first), x) if self.varlen else x[sequence, None, None]

    @cute.jit
    def statistics(self, out, dout, lse, dlse, delta_rows, lse_log2, delta, packed, head, m_block, first, thread):
        """lse_log2 and delta of one tile of rows; neighbouring lanes share a row."""
        lanes = self.lanes
        rows_at_once = _THREADS // lanes
        column = thread % lanes * _VECTOR
        for i in cutlass.range_constexpr(self.tile_m // rows_at_once):
            local = i * rows_at_once + thread // lanes
            row = m_block * self.tile_m + local
            address_out, exists = packed.address(out, row)
            address_dout, _ = packed.address(dout, row)
            total = Float32(0.0)
            if exists and column < self.head_dim_v:
                o = cute.make_rmem_tensor(_VECTOR, out.element_type)
                do = cute.make_rmem_tensor(_VECTOR, out.element_type)
                layout = cute.make_layout(_VECTOR)
                cute.autovec_copy(cute.make_tensor((address_out + column).align(16), layout), o)
                cute.autovec_copy(cute.make_tensor((address_dout + column).align(16), layout), do)
                products = o.load().to(Float32) * do.load().to(Float32)
                total = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            total = cute.arch.warp_reduction_sum(total, threads_in_group=lanes)
            if column == 0:
                row_lse = -Float32.inf
                if exists:
                    row_lse = lse[packed.head(row), packed.query(row)]
                    if cutlass.const_expr(dlse is not None):
                        total -= dlse[packed.head(row), packed.query(row)]
                    if cutlass.const_expr(delta_rows is not None):
                        delta_rows[packed.head(row), packed.query(row)] = total
                lse_log2[head, first + local] = Float32.inf if row_lse == -Float32.inf else row_lse * LOG2_E
                delta[head, first + local] = total
