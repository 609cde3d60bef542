"""The forward kernel: a block of threads owns one tile of query rows and walks the key blocks from last to first.

Per key block: S = Q K^T, softmax in registers, O += P V. K and V travel through rings of `stages` tiles: while S is
multiplied the next V is on its way, while O is multiplied the next K is. Barriers: a tile is overwritten only after
the barrier that follows its last read; a tile is read only after cp.async.wait_group and a barrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from .. import jit
from ..core.arguments import fake_lengths
from ..core.heads import PackedRows
from ..core.mask import Band
from ..core.schedule import Tile
from ..core.score import Softcap
from ..core.seqlen import Rows, align_strides, sequence_of
from ..core.softmax import OnlineSoftmax
from ..device import Chip
from .loader import TileCopy, async_copy, plain_copy, thread_tiling
from .tensor_core import (
    as_operand_a,
    operand_a,
    operand_b,
    product,
    rows_by_columns,
    smem_layout,
    tiled_mma,
    transposed,
)
from .tiles import ForwardTiles, padded


@dataclass(frozen=True)
class ForwardKernel:
    """What the generated code depends on, and so the compile key.

    group: heads_q / heads_kv. packed: the heads of a group are rows of one tile (see `core.heads`). split: the keys of
    a tile are shared among blocks, out and lse have a leading axis of parts and are float32, for `fwd.combine`.
    """

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    tiles: ForwardTiles
    group: int
    packed: bool
    varlen: bool
    has_seqused_q: bool
    has_seqused_k: bool
    has_left: bool
    has_right: bool
    has_softcap: bool
    sink_dtype: torch.dtype | None
    split: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.tiles.warps

    @property
    def rows_per_query(self) -> int:
        return self.group if self.packed else 1

    @property
    def element(self) -> type[cutlass.Numeric]:
        return jit.dsl_dtype(self.dtype)

    def compile(self, chip: Chip):
        """Compile the launcher, whose arguments are those of `__call__` without the stream."""
        rank = 3 if self.varlen else 4
        out = jit.fake_tensor(Float32, rank + 1) if self.split else jit.fake_tensor(self.element, rank)
        return jit.compile_kernel(
            self,
            *(jit.fake_tensor(self.element, rank) for _ in range(3)),
            out,
            jit.fake_tensor(Float32, rank if self.split else rank - 1, contiguous=True, align=4),
            jit.fake_tensor(jit.dsl_dtype(self.sink_dtype), 1, align=2) if self.sink_dtype else None,
            *fake_lengths(self),
            *(Int32(0), Int32(0), Int32(0), Int32(0), Float32(0), Float32(0), Int32(0), Int32(0)),
            jit.current_stream(),
            chip=chip,
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sink: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        batch: Int32,
        section: Int32,
        splits: Int32,
        max_seqlen_q: Int32,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        stream,
    ):
        q, k, v, out = (align_strides(x) for x in (q, k, v, out))
        m_blocks = cute.ceil_div(max_seqlen_q * self.rows_per_query, self.tiles.tile_m)
        heads = out.shape[-2] // self.rows_per_query
        # With a softcap, scores become tanh(scale_over_cap * q.k), which `scale` turns into logits.
        scale, scale_over_cap = softmax_scale, Float32(0.0)
        if cutlass.const_expr(self.has_softcap):
            scale, scale_over_cap = softcap, softmax_scale / softcap
        self.kernel(
            q,
            k,
            v,
            out,
            lse,
            sink,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            m_blocks,
            heads,
            batch,
            section,
            splits,
            scale,
            scale_over_cap,
            window_left,
            window_right,
        ).launch(
            grid=[m_blocks * heads * batch * splits, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.tiles.smem_bytes(self.head_dim, self.head_dim_v),
            min_blocks_per_mp=self.tiles.blocks_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sink: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        m_blocks: Int32,
        heads: Int32,
        batch: Int32,
        section: Int32,
        splits: Int32,
        scale: Float32,
        scale_over_cap: Float32,
        window_left: Int32,
        window_right: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        part = Int32(0)
        if cutlass.const_expr(self.split):
            index, part = index // splits, index % splits
            rest = (None,) * (cute.rank(out) - 1)
            out, lse = out[(part, *rest)], lse[(part, *rest[:-1])]
        block, head, sequence = Tile.of(index, m_blocks, heads, batch, section)
        m_block = m_blocks - 1 - block  # last query rows first: under a causal mask they take longest
        head_kv = head if cutlass.const_expr(self.packed) else head // self.group

        extent = 0 if cutlass.const_expr(self.varlen) else 1
        rows_q = Rows.of(sequence, q.shape[extent], cu_seqlens_q, seqused_q)
        rows_k = Rows.of(sequence, k.shape[extent], cu_seqlens_k, seqused_k)
        q, out = (sequence_of(x, sequence, rows_q, self.varlen) for x in (q, out))
        k, v = (sequence_of(x, sequence, rows_k, self.varlen)[None, head_kv, None] for x in (k, v))
        if cutlass.const_expr(self.varlen):
            lse = cute.domain_offset((0, rows_q.first), lse)
        else:
            lse = lse[sequence, None, None]
        packed = PackedRows(head * self.rows_per_query, rows_q.count, self.rows_per_query)
        mask = Band(
            self.tiles.tile_m,
            self.tiles.tile_n,
            rows_q.count,
            rows_k.count,
            window_left if cutlass.const_expr(self.has_left) else None,
            window_right if cutlass.const_expr(self.has_right) else None,
            self.rows_per_query,
        )
        part = (part, splits) if cutlass.const_expr(self.split) else None
        run = partial(self.tile, q, k, v, out, lse, sink, packed, mask, part, thread, scale, scale_over_cap)
        if m_block * self.tiles.tile_m < rows_q.count * self.rows_per_query:
            run(m_block)

    @cute.jit
    def tile(self, q, k, v, out, lse, sink, packed, mask, part, thread, scale, scale_over_cap, m_block):
        """One tile of query rows: q, out (rows, heads, dim), k, v (rows, dim), lse (heads, rows). part: (index, count)
        of this block's share of the keys, or None for all."""
        tiles, dim, dim_v = self.tiles, padded(self.head_dim), padded(self.head_dim_v)
        smem = SmemAllocator()
        # The output tile leaves through the memory that held Q.
        q_or_o = smem.allocate_array(self.element, tiles.tile_m * max(dim, dim_v), byte_alignment=1024)
        s_q = cute.make_tensor(q_or_o, smem_layout(tiles.tile_m, dim))
        s_o = cute.make_tensor(q_or_o, smem_layout(tiles.tile_m, dim_v))
        s_k = smem.allocate_tensor(self.element, smem_layout(tiles.tile_n, dim, tiles.stages), 1024)
        s_v = smem.allocate_tensor(self.element, smem_layout(tiles.tile_n, dim_v, tiles.stages), 1024)

        copy_qk = thread_tiling(async_copy(self.element), self.threads, dim)
        copy_v = thread_tiling(async_copy(self.element), self.threads, dim_v)
        load_q = TileCopy(copy_qk, thread, tiles.tile_m, dim, self.head_dim)
        load_k = TileCopy(copy_qk, thread, tiles.tile_n, dim, self.head_dim)
        load_v = TileCopy(copy_v, thread, tiles.tile_n, dim_v, self.head_dim_v)

        mma = tiled_mma(self.element, tiles.warps, 1)
        thread_mma = mma.get_slice(thread)
        acc_o = cute.make_rmem_tensor(thread_mma.partition_shape_C((tiles.tile_m, dim_v)), Float32)
        acc_o.fill(0.0)
        own = rows_by_columns(thread_mma.partition_C(cute.make_identity_tensor((tiles.tile_m, tiles.tile_n))))
        first = rows_by_columns(mma.get_slice(0).partition_C(cute.make_identity_tensor((tiles.tile_m, tiles.tile_n))))
        blocks = mask.key_blocks(m_block)
        if cutlass.const_expr(part is not None):
            blocks = blocks.part(*part)
        state = SimpleNamespace(
            mma=mma,
            q=operand_a(mma, s_q, thread),
            k=operand_b(mma, s_k, thread),
            v=operand_b(mma, transposed(s_v), thread, transpose=True),
            s_k=s_k,
            s_v=s_v,
            g_k=cute.local_tile(k, (tiles.tile_n, dim), (None, 0)),
            g_v=cute.local_tile(v, (tiles.tile_n, dim_v), (None, 0)),
            load_k=load_k,
            load_v=load_v,
            acc_o=acc_o,
            softmax=OnlineSoftmax.start(acc_o.shape[0][1] * acc_o.shape[1], scale),
            scale_over_cap=scale_over_cap,
            own=own,
            first=first,
            own_o=rows_by_columns(thread_mma.partition_C(cute.make_identity_tensor((tiles.tile_m, dim_v)))),
            mask=mask,
            m_block=m_block,
            blocks=blocks,
        )

        # Bound here: a record passed to a call inside a run-time branch would be carried through it, value by value.
        step, load = partial(self.step, state), partial(self.load, state)
        if blocks.first < blocks.stop:
            load_q.load_rows(lambda r: packed.address(q, m_block * tiles.tile_m + r), s_q)
            for stage in cutlass.range_constexpr(tiles.stages):
                load(blocks.stop - 1 - stage, stage, is_k=True, ragged=stage == 0)
                if cutlass.const_expr(stage + 1 < tiles.stages):
                    load(blocks.stop - 1 - stage, stage, is_k=False, ragged=stage == 0)
            # Blocks cut by the right edge of the mask or the end of the keys, whole blocks, blocks cut on the left.
            for i in cutlass.range(blocks.stop - blocks.full_stop, unroll=1):
                step(blocks.stop - 1 - i, masked=True)
            for i in cutlass.range(blocks.full_stop - blocks.full_first, unroll=1):
                step(blocks.full_stop - 1 - i, masked=False)
            if cutlass.const_expr(self.has_left):
                for i in cutlass.range(blocks.full_first - blocks.first, unroll=1):
                    step(blocks.full_first - 1 - i, masked=True)

        self.finish(state, out, lse, sink, packed, s_o, thread)

    @cute.jit
    def load(self, state, n, stage, is_k: cutlass.Constexpr[bool], ragged: cutlass.Constexpr[bool]):
        """Start loading key block n, if there is one; always one cp.async group, so that groups can be counted."""
        load_tile = (state.load_k if is_k else state.load_v).load_tile
        source = (state.g_k if is_k else state.g_v)[None, None, n]
        target = (state.s_k if is_k else state.s_v)[None, None, stage]
        left = state.mask.seqlen_k - n * self.tiles.tile_n if ragged else None
        if n >= state.blocks.first:
            load_tile(source, target, left)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def step(self, state, n, masked: cutlass.Constexpr[bool]):
        """One key block: S, softmax, O. On entry loads of K(n), V(n), ... K(n - stages + 1) have been started."""
        stages = self.tiles.stages
        turn = state.blocks.stop - 1 - n
        stage = turn % stages if cutlass.const_expr(stages > 1) else 0
        shape = state.mma.get_slice(0).partition_shape_C((self.tiles.tile_m, self.tiles.tile_n))
        acc_s = cute.make_rmem_tensor(shape, Float32)
        acc_s.fill(0.0)

        cute.arch.cp_async_wait_group(2 * (stages - 1))  # K(n) is here
        cute.arch.barrier()
        last_v = (turn + stages - 1) % stages if cutlass.const_expr(stages > 1) else 0
        self.load(state, n - stages + 1, last_v, is_k=False, ragged=masked and stages == 1)
        product(state.mma, acc_s, state.q, state.k.at(stage))

        cute.arch.cp_async_wait_group(2 * (stages - 1))  # V(n) is here, and K(n) has been read by all
        cute.arch.barrier()
        self.load(state, n - stages, stage, is_k=True, ragged=False)
        if cutlass.const_expr(self.has_softcap):
            cap = Softcap(state.scale_over_cap)
            for i in range(cute.size(acc_s)):
                acc_s[i] = cap.apply(acc_s[i])
        scores = rows_by_columns(acc_s)
        if cutlass.const_expr(masked):
            state.mask.hide(scores, state.own, state.first, state.m_block, n)
        state.softmax.update(scores, rows_by_columns(state.acc_o), may_be_empty=masked)
        weights = cute.make_fragment_like(acc_s, self.element)
        weights.store(acc_s.load().to(self.element))
        product(state.mma, state.acc_o, as_operand_a(weights), state.v.at(stage))

    @cute.jit
    def finish(self, state, out, lse, sink, packed, s_o, thread):
        """Normalise; write lse and the output."""
        rows = cute.size(state.softmax.maximum)
        row_lse = cute.make_rmem_tensor(rows, Float32)
        sinks = None
        if cutlass.const_expr(sink is not None):
            sinks = cute.make_rmem_tensor(rows, Float32)
            for r in cutlass.range_constexpr(rows):
                row = state.m_block * self.tiles.tile_m + state.own[r, 0][0]
                sinks[r] = Float32(sink[packed.head(row)])
        state.softmax.finish(rows_by_columns(state.acc_o), row_lse, sinks)
        for r in cutlass.range_constexpr(rows):
            row = state.m_block * self.tiles.tile_m + state.own[r, 0][0]
            if state.own[0, 0][1] == 0 and packed.exists(row):
                lse[packed.head(row), packed.query(row)] = row_lse[r]

        if cutlass.const_expr(self.split):
            self.store_part(state, out, packed)
        else:
            self.store(state, out, packed, s_o, thread)

    @cute.jit
    def store_part(self, state, out, packed):
        """The float32 output straight from the registers."""
        acc = rows_by_columns(state.acc_o)
        pair = cute.make_layout(2)
        for r in cutlass.range_constexpr(cute.size(acc, mode=[0])):
            address, exists = packed.address(out, state.m_block * self.tiles.tile_m + state.own[r, 0][0])
            for c in cutlass.range_constexpr(0, cute.size(acc, mode=[1]), 2):
                column = state.own_o[0, c][1]
                if exists and column < self.head_dim_v:
                    values = cute.make_rmem_tensor(2, Float32)
                    values[0], values[1] = acc[r, c], acc[r, c + 1]
                    cute.autovec_copy(values, cute.make_tensor((address + column).align(8), pair))

    @cute.jit
    def store(self, state, out, packed, s_o, thread):
        """The output in the inputs' dtype, through shared memory so that rows leave in 16-byte pieces."""
        cute.arch.barrier()  # everyone is done reading Q
        half = cute.make_fragment_like(state.acc_o, self.element)
        half.store(state.acc_o.load().to(self.element))
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.element, num_bits_per_copy=32)
        to_smem = cute.make_tiled_copy_C(atom, state.mma).get_slice(thread)
        cute.copy(to_smem, to_smem.retile(half), to_smem.partition_D(s_o))
        cute.arch.barrier()
        dim_v = padded(self.head_dim_v)
        copy = thread_tiling(plain_copy(self.element), self.threads, dim_v)
        store = TileCopy(copy, thread, self.tiles.tile_m, dim_v, self.head_dim_v)
        store.store_rows(s_o, lambda r: packed.address(out, state.m_block * self.tiles.tile_m + r))
