"""Kernel body of the portable forward: one tile of query rows, and the loop over key blocks from last to first.

Per key block: S = Q K^T, softmax in registers, O += P V. K and V each have `stages` stages: the next V loads during
Q K^T, the next K during P V. A stage is overwritten only after the barrier that follows its last read, and read only
after cp.async.wait_group and a barrier.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from ..core.bytes import UNIT
from ..core.cache import CacheTensors, Keys, Paged, Strided
from ..core.constant import Constant
from ..core.dropout import Dropout
from ..core.fragment_coords import fragment_rows, store_fragment_rows
from ..core.mask import Band, BlockIterator, ReverseRange, SparseBlocks, range_blocks, sparse_blocks
from ..core.order import Order, PackedOrder
from ..core.score import apply_softcap
from ..core.sequence import Lengths, extent, sequence_matrix
from ..core.stored import Stored
from ..core.traced import ModTensors, bind
from ..fwd.device.scales import nonzero_descale
from .config import Sm80ForwardConfig
from .converting import ConvertingCopy, ScaledRowsCopy
from .dropout import drop
from .loader import TileCopy, async_copy, columns_from, rows_of, store_tile, thread_tiling
from .softmax import OnlineSoftmax
from .tensor_core import (
    as_operand_a,
    mma_coords,
    operand_a,
    operand_b,
    product,
    rows_by_columns,
    smem_layout,
    tiled_mma,
    transposed,
)


@dataclass(frozen=True)
class Sm80ForwardArguments:
    """Run-time arguments of the kernel. Matrices have the modes of `core.sequence.as_matrices`; q, out and lse have
    packed heads; with split-KV, out and lse have a last mode of parts."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    sink: cute.Tensor | None
    lengths: Lengths
    order: Order | PackedOrder
    splits: Int32
    part_blocks: Int32 | None
    left: Int32 | None
    right: Int32 | None
    scale_over_cap: Float32 | None  # softmax_scale / softcap
    scale: Float32  # factor from scores (or the output of the softcap) to logits
    mods: ModTensors | None
    cache: CacheTensors | None


class Sm80ForwardWork(Constant):
    """Work of a CTA: a tile of query rows of one sequence and head, and a slice of the columns of V and O.

    q, out: (packed rows, dim). lse: (packed rows, 1). keys: where the rows of the keys are; k, v: those of one head.
    v_columns: columns of the slice that exist in global memory, if fewer than `cfg.dim_v`.
    """

    def __init__(
        self, args: Sm80ForwardArguments, cfg: Sm80ForwardConfig, index: Int32, part: Int32, v_slice: Int32
    ) -> None:
        self.args, self.cfg, self.v_slice, out, lse = args, cfg, v_slice, args.out, args.lse
        self.v_all, self.v_columns = args.v, cfg.head_dim_v
        if cfg.v_slices > 1:
            first = v_slice * cfg.dim_v
            self.v_all, out = columns_from(args.v, first), columns_from(out, first)
            is_even = cfg.head_dim_v == cfg.v_slices * cfg.dim_v
            self.v_columns = cfg.dim_v if is_even else cfg.head_dim_v - first
        if cfg.split:
            out, lse = (x[(*[None] * (len(x.shape) - 1), part)] for x in (out, lse))
        self.m_block, self.head, self.sequence = args.order.at(index)
        self.head_kv = self.head * cfg.packed_heads // cfg.group
        rows_q = args.lengths.queries(self.sequence, extent(args.q))
        self.keys = Keys.of(args.lengths, args.cache, args.k, self.sequence, cfg)
        self.q, self.out, self.lse = (
            sequence_matrix(x, self.head, self.sequence, rows_q, cfg.varlen) for x in (args.q, out, lse)
        )
        self.lengths = rows_q.count, self.keys.count
        self.mask = Band(cfg.rows, cfg.tile_n, *self.lengths, args.left, args.right, cfg.packed_heads)

    def bind(self, part: Int32) -> None:
        """Add what only a tile with query rows needs: key blocks (with split-KV, of this CTA's part), mods, scales."""
        args, cfg, packed, sequence = self.args, self.cfg, self.cfg.packed_heads, self.sequence
        self.score_mod, self.mask_mod = bind(cfg.mods, args.mods, sequence, self.head * packed, self.lengths, packed)
        self.dropout = Dropout.of(cfg.mods, args.mods, sequence, self.head * packed, packed)
        self.block_iter: BlockIterator
        if cfg.has_blocks:
            block_q, block_k = cfg.mods.block
            row, ratio = self.m_block // (block_q // cfg.rows), block_k // cfg.tile_n
            exists = Boolean(True) if cfg.lengths_vary else None
            self.block_iter = SparseBlocks.of(
                args.mods.blocks, sequence, self.head, row, ratio, self.keys.count, cfg.tile_n, exists
            )
        else:
            blocks = self.mask.key_blocks(self.m_block)
            self.block_iter = ReverseRange(blocks.part(part, args.splits, args.part_blocks) if cfg.split else blocks)
        self.scale_over_cap, self.v_descale = args.scale_over_cap, None  # v_descale: factor of O at the end
        self.raw_scale = args.scale  # of raw scores, or of the result of the softcap
        if cfg.converts_kv:
            k_descale, self.v_descale = Float32(UNIT), Float32(UNIT)
            if cfg.has_factors:
                k_descale = nonzero_descale(args.cache.k_descale[sequence, self.head_kv])
                self.v_descale = args.cache.v_descale[sequence, self.head_kv]
            if cfg.has_softcap:
                self.scale_over_cap = self.scale_over_cap * k_descale
            else:
                self.raw_scale = self.raw_scale * k_descale
        self.thread = cute.arch.thread_idx()[0]
        self.k, self.v = self.keys.of_head(args.k, self.head_kv), self.keys.of_head(self.v_all, self.head_kv)
        self.scales: tuple[Strided | Paged | None, ...] = None, None  # of k and v
        if cfg.is_nvfp4:
            self.scales = tuple(self.keys.of_head(args.cache.scales(name), self.head_kv) for name in "kv")

    @property
    def first_row(self) -> Int32:
        return self.m_block * self.cfg.rows

    @property
    def rows(self) -> Int32:
        """Packed query rows of the sequence and head."""
        return self.lengths[0] * self.cfg.packed_heads

    @property
    def scale(self) -> Float32:
        """Factor from the input of softmax to logits."""
        return self.raw_scale if self.score_mod is None else Float32(1.0)


class ForwardTileState(Constant):
    """Shared memory (O is staged over Q), the operands of the products there, and O and softmax state in registers."""

    def __init__(self, work: Sm80ForwardWork) -> None:
        cfg, tiles, thread, smem = work.cfg, work.cfg.tiles, work.thread, SmemAllocator()
        q_and_o = smem.allocate_array(cfg.dtype, tiles.tile_m * max(cfg.dim, cfg.dim_v), byte_alignment=1024)
        self.s_q, self.s_o = (
            cute.make_tensor(q_and_o, smem_layout(tiles.tile_m, columns)) for columns in (cfg.dim, cfg.dim_v)
        )
        self.s_k, self.s_v = (
            smem.allocate_tensor(cfg.dtype, smem_layout(tiles.tile_n, columns, tiles.stages), 1024)
            for columns in (cfg.dim, cfg.dim_v)
        )
        self.mma = tiled_mma(cfg.dtype, tiles.warps, 1)
        shape = self.mma.get_slice(thread).partition_shape_C((tiles.tile_m, cfg.dim_v))
        self.o = cute.make_rmem_tensor(shape, Float32)
        self.q, self.k = operand_a(self.mma, self.s_q, thread), operand_b(self.mma, self.s_k, thread)
        self.v = operand_b(self.mma, transposed(self.s_v), thread, transpose=True)
        self.softmax = OnlineSoftmax(self.o.shape[0][1] * self.o.shape[1], work.scale)


@cute.kernel
def kernel(args: Sm80ForwardArguments, cfg: cutlass.Constexpr[Sm80ForwardConfig]):
    """Find the work of this CTA and process it."""
    index, part, v_slice = cute.arch.block_idx()[0], Int32(0), Int32(0)
    if const_expr(cfg.v_slices > 1):  # neighbours read the same Q and K
        index, v_slice = index // cfg.v_slices, index % cfg.v_slices
    if const_expr(cfg.split):
        index, part = index // args.splits, index % args.splits
    work = Sm80ForwardWork(args, cfg, index, part, v_slice)
    if work.first_row < work.rows:
        work.bind(part)
        process_tile(work)


@cute.jit
def process_tile(work: Sm80ForwardWork):
    cfg, stages, block_iter = work.cfg, work.cfg.tiles.stages, work.block_iter
    tile = ForwardTileState(work)
    tile.o.fill(0.0)
    if block_iter.any():
        load_queries(work, tile)
        for stage in cutlass.range_constexpr(stages):
            load(work, work.k, tile.s_k, block_iter.ahead(block_iter.start(), stage), stage, stage == 0)
            if const_expr(stage + 1 < stages):
                load(work, work.v, tile.s_v, block_iter.ahead(block_iter.start(), stage), stage, stage == 0)
        if const_expr(cfg.has_blocks):
            block_iter = sparse_blocks(work.block_iter)
            for i in cutlass.range(block_iter.masked, unroll=1):
                step(work, tile, i, True)
            for i in cutlass.range(block_iter.count - block_iter.masked, unroll=1):
                step(work, tile, block_iter.masked + i, False)
        else:
            # Blocks masked by the right bound or the end of the keys, full blocks, blocks masked by the left bound.
            blocks = range_blocks(work.block_iter)
            for i in cutlass.range(blocks.stop - blocks.full_stop, unroll=1):
                step(work, tile, blocks.stop - 1 - i, True)
            for i in cutlass.range(blocks.full_stop - blocks.full_first, unroll=1):
                step(work, tile, blocks.full_stop - 1 - i, False)
            if const_expr(cfg.has_left):
                for i in cutlass.range(blocks.full_first - blocks.first, unroll=1):
                    step(work, tile, blocks.full_first - 1 - i, True)
    finish(work, tile)


def load_queries(work: Sm80ForwardWork, tile: ForwardTileState) -> None:
    """Start loading Q. It belongs to the cp.async group of the first K."""
    cfg, m = work.cfg, work.cfg.tiles.tile_m
    copy = TileCopy(thread_tiling(async_copy(cfg.dtype), cfg.threads, cfg.dim), work.thread, m, cfg.dim, cfg.head_dim)
    copy.load_rows(rows_of(work.q, work.first_row, work.rows), tile.s_q)


@cute.jit
def load(
    work: Sm80ForwardWork,
    x: Strided | Paged,
    staged: cute.Tensor,
    pos: Int32,
    stage: Int32,
    checks_end: cutlass.Constexpr[bool],
):
    """Start loading the key block at `pos` of the block iterator, of K or V (`x`), if it exists. Always commit one
    cp.async group, so that groups can be counted. checks_end: the sequence may end within the block."""
    cfg, tile_n = work.cfg, work.cfg.tiles.tile_n
    dim = cute.size(staged, mode=[1])
    columns = cfg.head_dim if const_expr(x is work.k) else work.v_columns
    copy = TileCopy(thread_tiling(async_copy(cfg.dtype), cfg.threads, dim), work.thread, tile_n, dim, columns)
    if work.block_iter.exists(pos):
        n_block = work.block_iter.block(pos)
        if const_expr(cfg.converts_kv):
            stored, first_key = Stored(cfg.cache.dtype, cfg.dtype, has_cvt=False), n_block * tile_n
            arguments = copy.copy, work.thread, tile_n, dim, columns, stored
            if const_expr(cfg.cache.has_scaled_rows):  # V is read from K
                first = 0 if const_expr(x is work.k) else work.v_slice * cfg.dim_v
                ScaledRowsCopy(*arguments, None, first).load_rows(
                    work.k.rows_from(first_key), staged[None, None, stage]
                )
            else:
                scales = work.scales[const_expr(x is work.v)]
                scale_rows = None if const_expr(scales is None) else scales.rows_from(first_key)
                ConvertingCopy(*arguments, scale_rows).load_rows(x.rows_from(first_key), staged[None, None, stage])
        elif const_expr(x.has_constant_stride(tile_n)):
            rows_left = (
                work.mask.seqlen_k - n_block * tile_n
                if const_expr(checks_end or isinstance(work.block_iter, SparseBlocks))
                else None
            )
            copy.load_tile(x.block(n_block, tile_n, dim), staged[None, None, stage], rows_left)
        else:
            copy.load_rows(x.rows_from(n_block * tile_n), staged[None, None, stage])
    cute.arch.cp_async_commit_group()


@cute.jit
def step(work: Sm80ForwardWork, tile: ForwardTileState, pos: Int32, masked: cutlass.Constexpr[bool]):
    """Process the key block at `pos` of the block iterator: S, softmax, O. On entry, loads of K and V have started for
    this block up to K of the block `stages - 1` ahead."""
    cfg, mma, stages, block_iter = work.cfg, tile.mma, work.cfg.tiles.stages, work.block_iter
    m, n = cfg.tiles.tile_m, cfg.tiles.tile_n
    iteration = block_iter.iteration(pos)
    stage = iteration % stages if const_expr(stages > 1) else 0
    s = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_C((m, n)), Float32)
    s.fill(0.0)

    cute.arch.cp_async_wait_group(2 * (stages - 1))  # K has arrived
    cute.arch.barrier()
    v_stage = (iteration + stages - 1) % stages if const_expr(stages > 1) else 0
    load(work, work.v, tile.s_v, block_iter.ahead(pos, stages - 1), v_stage, masked and stages == 1)
    product(mma, s, tile.q, tile.k.at(stage))

    cute.arch.cp_async_wait_group(2 * (stages - 1))  # V has arrived
    cute.arch.barrier()  # and all threads have read K
    load(work, work.k, tile.s_k, block_iter.ahead(pos, stages), stage, False)
    if const_expr(cfg.has_softcap):
        apply_softcap(s, work.scale_over_cap)
    scores = rows_by_columns(s)
    apply_mods(work, mma, scores, block_iter.block(pos), masked)
    may_be_empty = masked or work.score_mod is not None or work.mask_mod is not None
    tile.softmax.update(scores, rows_by_columns(tile.o), may_be_empty)
    if const_expr(work.dropout is not None):
        coords = coords_of_thread(mma, work.thread, m, n)
        rows = [work.first_row + coords[r, 0][0] for r in range(cute.size(coords, mode=[0]))]
        store_fragment_rows(scores, drop(work.dropout, fragment_rows(scores), rows, block_iter.block(pos) * n))
    p = cute.make_fragment_like(s, cfg.dtype)
    p.store(s.load().to(cfg.dtype))
    product(mma, tile.o, as_operand_a(p), tile.v.at(stage))


@cute.jit
def apply_mods(
    work: Sm80ForwardWork, mma: cute.TiledMma, scores: cute.Tensor, n_block: Int32, masked: cutlass.Constexpr[bool]
):
    """Apply score_mod, mask_mod and the band to the scores of a key block."""
    m, n = work.cfg.tiles.tile_m, work.cfg.tiles.tile_n
    coords, coords0 = coords_of_thread(mma, work.thread, m, n), coords_of_thread(mma, 0, m, n)
    fragment = mma_coords(coords, coords0, work.first_row, n_block * n)
    if const_expr(work.score_mod is not None):
        store_fragment_rows(scores, work.score_mod.at(fragment, work.raw_scale).logits(fragment_rows(scores)))
    is_sparse = isinstance(work.block_iter, SparseBlocks)
    if const_expr(work.mask_mod is not None and (masked or not is_sparse)):
        store_fragment_rows(scores, work.mask_mod.at(fragment).apply_mask(fragment_rows(scores)))
    if const_expr(is_sparse):
        if work.mask.needs_mask(work.m_block, n_block):  # a last block listed as full may still exceed the keys
            work.mask.apply_mask(scores, coords, coords0, work.m_block, n_block)
    elif const_expr(masked):
        work.mask.apply_mask(scores, coords, coords0, work.m_block, n_block)


def coords_of_thread(mma: cute.TiledMma, thread: Int32 | int, rows: int, columns: int) -> cute.Tensor:
    """(row, column) in the tile of each accumulator of a thread, as rows by columns."""
    return rows_by_columns(mma.get_slice(thread).partition_C(cute.make_identity_tensor((rows, columns))))


@cute.jit
def finish(work: Sm80ForwardWork, tile: ForwardTileState):
    """Normalise O; write lse and out."""
    cfg, sink = work.cfg, work.args.sink
    coords = coords_of_thread(tile.mma, work.thread, cfg.tiles.tile_m, cfg.dim_v)
    rows = cute.size(tile.softmax.row_max)
    row_lse = cute.make_rmem_tensor(rows, Float32)
    sinks = None
    if const_expr(sink is not None):
        sinks = cute.make_rmem_tensor(rows, Float32)
        for r in cutlass.range_constexpr(rows):
            row = work.first_row + coords[r, 0][0]
            sinks[r] = Float32(sink[work.head * cfg.packed_heads + row % cfg.packed_heads])
    tile.softmax.finish(rows_by_columns(tile.o), row_lse, sinks)
    if const_expr(work.dropout is not None):
        tile.o.store(tile.o.load() * work.dropout.scale)
    if const_expr(work.v_descale is not None):
        tile.o.store(tile.o.load() * work.v_descale)
    for r in cutlass.range_constexpr(rows):
        row = work.first_row + coords[r, 0][0]
        if coords[0, 0][1] == 0 and row < work.rows and work.v_slice == 0:
            work.lse[row, 0] = row_lse[r]

    if const_expr(cfg.split):
        store_part(work, tile, coords)
    else:
        cute.arch.barrier()  # all threads have read Q, and O is staged over it
        out_row = rows_of(work.out, work.first_row, work.rows)
        store_tile(tile.o, tile.mma, tile.s_o, out_row, work.thread, cfg.threads, work.v_columns)


@cute.jit
def store_part(work: Sm80ForwardWork, tile: ForwardTileState, coords: cute.Tensor):
    """Store float32 O of a split-KV part directly from registers."""
    o, out_row = rows_by_columns(tile.o), rows_of(work.out, work.first_row, work.rows)
    for r in cutlass.range_constexpr(cute.size(o, mode=[0])):
        address, exists = out_row(coords[r, 0][0])
        for c in cutlass.range_constexpr(0, cute.size(o, mode=[1]), 2):
            column = coords[0, c][1]
            if exists and column < work.v_columns:
                pair = cute.make_rmem_tensor(2, Float32)
                pair[0], pair[1] = o[r, c], o[r, c + 1]
                cute.autovec_copy(pair, cute.make_tensor((address + column).align(8), cute.make_layout(2)))
