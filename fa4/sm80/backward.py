"""The backward's main kernel: a block of threads owns one tile of keys and walks the query rows that see it.

Per tile of query rows: S = Q K^T and dP = dO V^T, P = exp2(S - lse), dS = P (dP - delta); then dV += P^T dO,
dQ = dS K is added to a float32 sum in global memory, and dK += dS^T Q. With GQA the rows of all heads of a group are
packed (`core.heads`), so dK and dV need no sum across blocks.

Two barriers a tile. After the first, Q, dO and the statistics have arrived, and P, dS and the buffers of the tile
before are free; the loads of the next tile start here. After the second, P and dS are complete. Deterministic: the
blocks of a tile of dQ add in the order of their keys, each waiting for its turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from .. import jit
from ..core.arguments import fake_lengths
from ..core.heads import PackedRows
from ..core.mask import Band
from ..core.schedule import Tile
from ..core.score import Softcap
from ..core.seqlen import Rows, align_strides, padded_first, sequence_of
from ..core.softmax import LOG2_E
from ..device import Chip
from .loader import TileCopy, async_copy, plain_copy, thread_tiling
from .tensor_core import (
    operand_a,
    operand_b,
    product,
    rows_by_columns,
    smem_layout,
    tiled_mma,
    transposed,
)
from .tiles import BackwardTiles, padded


@dataclass(frozen=True)
class BackwardKernel:
    """What the generated code depends on, and so the compile key. group: heads_q / heads_kv."""

    dtype: torch.dtype
    head_dim: int
    head_dim_v: int
    tiles: BackwardTiles
    group: int
    varlen: bool
    has_seqused_q: bool
    has_seqused_k: bool
    has_left: bool
    has_right: bool
    has_softcap: bool
    deterministic: bool

    @property
    def threads(self) -> int:
        return 32 * self.tiles.warps

    @property
    def element(self) -> type[cutlass.Numeric]:
        return jit.dsl_dtype(self.dtype)

    def compile(self, chip: Chip):
        """Compile the launcher, whose arguments are those of `__call__` without the stream."""
        x = partial(jit.fake_tensor, self.element, 3 if self.varlen else 4)
        return jit.compile_kernel(
            self,
            *(x() for _ in range(6)),
            jit.fake_tensor(Float32, 2),
            jit.fake_tensor(Float32, 2),
            jit.fake_tensor(Float32, 3),
            jit.fake_tensor(Int32, 2) if self.deterministic else None,
            *fake_lengths(self),
            *(Int32(0), Int32(0), Int32(0), Float32(0), Float32(0), Int32(0), Int32(0)),
            jit.current_stream(),
            chip=chip,
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq: cute.Tensor,
        turn: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        batch: Int32,
        section: Int32,
        max_seqlen_k: Int32,
        softmax_scale: Float32,
        softcap: Float32,
        window_left: Int32,
        window_right: Int32,
        stream,
    ):
        q, k, v, dout, dk, dv = (align_strides(x) for x in (q, k, v, dout, dk, dv))
        n_blocks = cute.ceil_div(max_seqlen_k, self.tiles.tile_n)
        heads = k.shape[-2]
        scale_log2, scale_over_cap = softmax_scale * LOG2_E, Float32(0.0)
        if cutlass.const_expr(self.has_softcap):
            scale_log2, scale_over_cap = softcap * LOG2_E, softmax_scale / softcap
        self.kernel(
            q,
            k,
            v,
            dout,
            dk,
            dv,
            lse_log2,
            delta,
            dq,
            turn,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            n_blocks,
            heads,
            batch,
            section,
            softmax_scale,
            scale_log2,
            scale_over_cap,
            window_left,
            window_right,
        ).launch(
            grid=[n_blocks * heads * batch, 1, 1],
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
        dout: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        lse_log2: cute.Tensor,
        delta: cute.Tensor,
        dq: cute.Tensor,
        turn: cute.Tensor | None,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        n_blocks: Int32,
        heads: Int32,
        batch: Int32,
        section: Int32,
        softmax_scale: Float32,
        scale_log2: Float32,
        scale_over_cap: Float32,
        window_left: Int32,
        window_right: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        # First keys first: under a causal mask they take longest, and in a deterministic run their turn is first.
        n_block, head, sequence = Tile.of(index, n_blocks, heads, batch, section)

        extent = 0 if cutlass.const_expr(self.varlen) else 1
        rows_q = Rows.of(sequence, q.shape[extent], cu_seqlens_q, seqused_q)
        rows_k = Rows.of(sequence, k.shape[extent], cu_seqlens_k, seqused_k)
        first = padded_first(sequence, rows_q, q.shape[extent], self.group, self.tiles.tile_m, self.varlen)
        q, dout = (sequence_of(x, sequence, rows_q, self.varlen) for x in (q, dout))
        k, v, dk, dv = (sequence_of(x, sequence, rows_k, self.varlen)[None, head, None] for x in (k, v, dk, dv))
        mask = Band(
            self.tiles.tile_m,
            self.tiles.tile_n,
            rows_q.count,
            rows_k.count,
            window_left if cutlass.const_expr(self.has_left) else None,
            window_right if cutlass.const_expr(self.has_right) else None,
            self.group,
        )
        work = SimpleNamespace(
            thread=thread,
            head=head,
            n_block=n_block,
            mask=mask,
            packed=PackedRows(head * self.group, rows_q.count, self.group),
            g_q=q,
            g_dout=dout,
            lse_log2=cute.domain_offset((first,), lse_log2[head, None]),
            delta=cute.domain_offset((first,), delta[head, None]),
            dq=cute.domain_offset((first, 0), dq[head, None, None]),
            turn=cute.domain_offset((first // self.tiles.tile_m,), turn[head, None])
            if cutlass.const_expr(self.deterministic)
            else None,
            softmax_scale=softmax_scale,
            scale_log2=scale_log2,
            scale_over_cap=scale_over_cap,
        )
        run = partial(self.tile, work)
        if n_block * self.tiles.tile_n < rows_k.count:
            run(k, v, dk, dv)

    @cute.jit
    def tile(self, work, k, v, dk, dv):
        """One tile of keys; k, v, dk, dv (rows, dim) of its sequence and head."""
        tiles, dim, dim_v, thread = self.tiles, padded(self.head_dim), padded(self.head_dim_v), work.thread
        m, n, stages = tiles.tile_m, tiles.tile_n, tiles.stages
        smem = SmemAllocator()
        s_k = smem.allocate_tensor(self.element, smem_layout(n, dim), 1024)
        s_v = smem.allocate_tensor(self.element, smem_layout(n, dim_v), 1024)
        s_q = smem.allocate_tensor(self.element, smem_layout(m, dim, stages), 1024)
        s_do = smem.allocate_tensor(self.element, smem_layout(m, dim_v, stages), 1024)
        s_p = smem.allocate_tensor(self.element, smem_layout(m, n), 1024)
        s_ds = smem.allocate_tensor(self.element, smem_layout(m, n), 1024)
        s_lse = smem.allocate_tensor(Float32, cute.make_layout((m, stages)), 128)
        s_delta = smem.allocate_tensor(Float32, cute.make_layout((m, stages)), 128)

        mma_s = tiled_mma(self.element, *tiles.warps_s)
        mma_kv = tiled_mma(self.element, *tiles.warps_kv)
        mma_q = tiled_mma(self.element, *tiles.warps_q)
        acc_dk = cute.make_rmem_tensor(mma_kv.get_slice(thread).partition_shape_C((n, dim)), Float32)
        acc_dv = cute.make_rmem_tensor(mma_kv.get_slice(thread).partition_shape_C((n, dim_v)), Float32)
        acc_dk.fill(0.0)
        acc_dv.fill(0.0)
        copy_qk = thread_tiling(async_copy(self.element), self.threads, dim)
        copy_v = thread_tiling(async_copy(self.element), self.threads, dim_v)
        grid_s = cute.make_identity_tensor((m, n))
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.element, num_bits_per_copy=32)
        to_smem = cute.make_tiled_copy_C(atom, mma_s).get_slice(thread)
        state = SimpleNamespace(
            mma_s=mma_s,
            mma_kv=mma_kv,
            mma_q=mma_q,
            acc_dk=acc_dk,
            acc_dv=acc_dv,
            # S = Q K^T and dP = dO V^T
            q=operand_a(mma_s, s_q, thread),
            k=operand_b(mma_s, s_k, thread),
            do=operand_a(mma_s, s_do, thread),
            v=operand_b(mma_s, s_v, thread),
            # dV = P^T dO and dK = dS^T Q
            pt=operand_a(mma_kv, transposed(s_p), thread, transpose=True),
            dot=operand_b(mma_kv, transposed(s_do), thread, transpose=True),
            dst=operand_a(mma_kv, transposed(s_ds), thread, transpose=True),
            qt=operand_b(mma_kv, transposed(s_q), thread, transpose=True),
            # dQ = dS K
            ds=operand_a(mma_q, s_ds, thread),
            kt=operand_b(mma_q, transposed(s_k), thread, transpose=True),
            to_smem=to_smem,
            p_out=to_smem.partition_D(s_p),
            ds_out=to_smem.partition_D(s_ds),
            s_q=s_q,
            s_do=s_do,
            s_lse=s_lse,
            s_delta=s_delta,
            load_q=TileCopy(copy_qk, thread, m, dim, self.head_dim),
            load_do=TileCopy(copy_v, thread, m, dim_v, self.head_dim_v),
            own=rows_by_columns(mma_s.get_slice(thread).partition_C(grid_s)),
            first=rows_by_columns(mma_s.get_slice(0).partition_C(grid_s)),
        )
        step, load = partial(self.step, work, state), partial(self.load, work, state)
        load_k = TileCopy(copy_qk, thread, n, dim, self.head_dim)
        load_v = TileCopy(copy_v, thread, n, dim_v, self.head_dim_v)
        rows_left = work.mask.seqlen_k - work.n_block * n
        m_first, m_stop = work.mask.query_blocks(work.n_block)
        if m_first < m_stop:
            load_k.load_tile(cute.local_tile(k, (n, dim), (work.n_block, 0)), s_k, rows_left)
            load_v.load_tile(cute.local_tile(v, (n, dim_v), (work.n_block, 0)), s_v, rows_left)
            load(m_stop - 1, 0)
            # Last rows first: there all blocks of a head meet, so their turns in a deterministic run follow closely.
            for i in cutlass.range(m_stop - m_first, unroll=1):
                step(m_stop - 1 - i, i, m_first)

        acc_dk.store(acc_dk.load() * work.softmax_scale)
        cute.arch.barrier()  # everyone is done with K and V: their memory carries dK and dV out
        pass_turn = partial(self.pass_turn, work)
        if cutlass.const_expr(self.deterministic):  # noqa: SIM102  one is decided at compile time
            if m_first < m_stop:
                pass_turn(m_first)
        self.store(acc_dk, mma_kv, s_k, dk, work.n_block, rows_left, thread, dim, self.head_dim)
        self.store(acc_dv, mma_kv, s_v, dv, work.n_block, rows_left, thread, dim_v, self.head_dim_v)

    @cute.jit
    def load(self, work, state, m_block, stage):
        """Start loading a tile of Q, dO and their statistics; one cp.async group."""
        m = self.tiles.tile_m
        packed, g_q, g_dout = work.packed, work.g_q, work.g_dout
        state.load_q.load_rows(lambda r: packed.address(g_q, m_block * m + r), state.s_q[None, None, stage])
        state.load_do.load_rows(lambda r: packed.address(g_dout, m_block * m + r), state.s_do[None, None, stage])
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=128)
        four = cute.make_layout(4)
        index = work.thread % (m // 4) * 4
        lse_from = (work.lse_log2.iterator + (m_block * m + index)).align(16)
        delta_from = (work.delta.iterator + (m_block * m + index)).align(16)
        lse_to = (state.s_lse.iterator + (stage * m + index)).align(16)
        delta_to = (state.s_delta.iterator + (stage * m + index)).align(16)
        if work.thread < m // 4:
            cute.copy(atom, cute.make_tensor(lse_from, four), cute.make_tensor(lse_to, four))
            cute.copy(atom, cute.make_tensor(delta_from, four), cute.make_tensor(delta_to, four))
        cute.arch.cp_async_commit_group()

    @cute.jit
    def step(self, work, state, m_block, turn, m_first):
        """One tile of query rows; `turn` counts them."""
        stages = self.tiles.stages
        stage = turn % stages if cutlass.const_expr(stages > 1) else 0
        m, n = self.tiles.tile_m, self.tiles.tile_n
        load = partial(self.load, work, state)
        cute.arch.cp_async_wait_group(0)
        cute.arch.barrier()
        pass_turn = partial(self.pass_turn, work)
        if cutlass.const_expr(self.deterministic):  # noqa: SIM102  one is decided at compile time
            # Not right behind the additions: by now they have long arrived, and the release waits for nothing.
            if turn > 0:
                pass_turn(m_block + 1)
        if cutlass.const_expr(stages > 1):  # noqa: SIM102  one is decided at compile time
            if m_block > m_first:
                load(m_block - 1, (turn + 1) % stages)

        shape = state.mma_s.get_slice(0).partition_shape_C((m, n))
        acc_s, acc_dp = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
        acc_s.fill(0.0)
        acc_dp.fill(0.0)
        product(state.mma_s, acc_s, state.q.at(stage), state.k)
        product(state.mma_s, acc_dp, state.do.at(stage), state.v)
        self.weights(work, state, acc_s, acc_dp, m_block, stage)
        cute.arch.barrier()

        product(state.mma_kv, state.acc_dv, state.pt, state.dot.at(stage))
        acc_dq = cute.make_rmem_tensor(state.mma_q.get_slice(0).partition_shape_C((m, padded(self.head_dim))), Float32)
        acc_dq.fill(0.0)
        product(state.mma_q, acc_dq, state.ds, state.kt)
        self.add_dq(work, acc_dq, m_block)
        product(state.mma_kv, state.acc_dk, state.dst, state.qt.at(stage))
        if cutlass.const_expr(stages == 1):
            cute.arch.barrier()
            if m_block > m_first:
                load(m_block - 1, 0)

    @cute.jit
    def weights(self, work, state, acc_s, acc_dp, m_block, stage):
        """P and dS from S and dP, into shared memory as 16-bit operands."""
        if cutlass.const_expr(self.has_softcap):
            cap = Softcap(work.scale_over_cap)
            for i in range(cute.size(acc_s)):
                acc_s[i] = cap.apply(acc_s[i])
        scores, grads = rows_by_columns(acc_s), rows_by_columns(acc_dp)
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            delta = state.s_delta[state.own[r, 0][0], stage]
            row = grads[r, None].load() - delta
            if cutlass.const_expr(self.has_softcap):
                capped = scores[r, None].load()
                row = row * (1.0 - capped * capped)
            grads[r, None].store(row)
        mask, own, first, n_block = work.mask, state.own, state.first, work.n_block
        if mask.cuts(m_block, n_block):
            mask.hide(scores, own, first, m_block, n_block)
        for r in cutlass.range_constexpr(cute.size(scores, mode=[0])):
            lse = state.s_lse[state.own[r, 0][0], stage]
            weights = cute.math.exp2(scores[r, None].load() * work.scale_log2 - lse, fastmath=True)
            scores[r, None].store(weights)
            grads[r, None].store(grads[r, None].load() * weights)
        for acc, target in ((acc_s, state.p_out), (acc_dp, state.ds_out)):
            half = cute.make_fragment_like(acc, self.element)
            half.store(acc.load().to(self.element))
            cute.copy(state.to_smem, state.to_smem.retile(half), target)

    @cute.jit
    def add_dq(self, work, acc_dq, m_block):
        """Add a tile of dQ to the sum. The sum keeps each thread's values `threads` apart, as `Postprocess` reads
        them: every instruction of a warp covers 128 contiguous bytes."""
        if cutlass.const_expr(self.deterministic):
            # All blocks of earlier keys that meet these rows add first.
            mine = work.n_block - work.mask.key_blocks(m_block).first
            flag = work.turn.iterator + m_block
            now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
            while now != mine:
                now = cute.arch.load(flag, Int32, sem="acquire", scope="gpu")
        start = work.dq.iterator + cute.crd2idx((m_block * self.tiles.tile_m, 0), work.dq.layout) + work.thread
        for i in cutlass.range_constexpr(cute.size(acc_dq)):
            cute.arch.red(start + i * self.threads, acc_dq[i], op="add", dtype="f32", sem="relaxed", scope="gpu")

    @cute.jit
    def pass_turn(self, work, m_block):
        """After a barrier behind `add_dq`: let the next block add to these rows."""
        flag = work.turn.iterator + m_block
        if work.thread == 0:
            cute.arch.red(flag, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")

    @cute.jit
    def store(self, acc, mma, s_x, x, n_block, rows_left, thread, dim: cutlass.Constexpr, columns: cutlass.Constexpr):
        """A tile of dK or dV through shared memory to its rows."""
        half = cute.make_fragment_like(acc, self.element)
        half.store(acc.load().to(self.element))
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.element, num_bits_per_copy=32)
        to_smem = cute.make_tiled_copy_C(atom, mma).get_slice(thread)
        cute.copy(to_smem, to_smem.retile(half), to_smem.partition_D(s_x))
        cute.arch.barrier()
        copy = thread_tiling(plain_copy(self.element), self.threads, dim)
        n = self.tiles.tile_n

        def row(r):
            return x.iterator + cute.crd2idx((n_block * n + r, 0), x.layout), r < rows_left

        TileCopy(copy, thread, n, dim, columns).store_rows(s_x, row)
