"""Kernel body of the portable backward: one tile of keys, and the loop over the tiles of query rows that see it.

Per tile of query rows: S = Q K^T and dP = dO V^T, P = exp2(S - lse), dS = P (dP - delta); then dV += P^T dO,
dQ = dS K is added to a float32 accumulator in global memory, and dK += dS^T Q.

There are two barriers per tile. After the first, Q, dO and the statistics have arrived, and P, dS and the buffers of
the previous tile are free; loads of the next tile start here. After the second, P and dS are complete. Deterministic:
key blocks add to a tile of dQ in ascending order, ordered by a semaphore.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ..bwd.device.semaphores import release_semaphore, semaphore_ptr, wait_semaphore
from ..bwd.device.work import order_index_by_lists
from ..core.captured_grads import CapturedGrads
from ..core.constant import Constant
from ..core.dropout import Dropout
from ..core.fragment_coords import fragment_rows, store_fragment_rows
from ..core.mask import Band, BlockIterator, Blocks, ReverseRange, SparseBlocks, range_blocks, sparse_blocks
from ..core.rows import first_row_block
from ..core.scoring import Scoring
from ..core.sequence import extent, sequence_matrix
from ..core.traced import bind
from .arguments import Sm80BackwardArguments
from .backward_work import SharedMemory, Sm80BackwardWork
from .config import Sm80BackwardConfig
from .dropout import dropout_factors, share_keep_bits
from .loader import TileCopy, async_copy, rows_of, store_tile, thread_tiling
from .tensor_core import (
    Operand,
    mma_coords,
    operand_a,
    operand_b,
    product,
    rows_by_columns,
    tiled_mma,
    transposed,
)


@dataclass(frozen=True)
class Products(Constant):
    """Products of a step: tiled MMAs, operands in shared memory, and the accumulators dK and dV."""

    mma_s: cute.TiledMma  # S = Q K^T and dP = dO V^T
    q: Operand
    k: Operand
    do: Operand
    v: Operand
    mma_kv: cute.TiledMma  # dV = P^T dO and dK = dS^T Q
    pt: Operand
    dot: Operand
    dst: Operand
    qt: Operand
    dv: cute.Tensor
    dk: cute.Tensor
    mma_q: cute.TiledMma  # dQ = dS K
    ds: Operand
    kt: Operand


@cute.jit
def work_on_keys(args: Sm80BackwardArguments, cfg: cutlass.Constexpr[Sm80BackwardConfig]):
    """Kernel body: find the work of this CTA and process it."""
    n_block, head, sequence = args.order.here()
    tiles = cfg.tiles
    rows_q = args.lengths.queries(sequence, extent(args.q))
    rows_k = args.lengths.keys(sequence, extent(args.k))
    q, dout = (sequence_matrix(x, head, sequence, rows_q, cfg.varlen) for x in (args.q, args.dout))
    k, v, dk, dv = (sequence_matrix(x, head, sequence, rows_k, cfg.varlen) for x in (args.k, args.v, args.dk, args.dv))
    mask = Band(tiles.tile_m, tiles.tile_n, rows_q.count, rows_k.count, args.window.left, args.window.right, cfg.group)
    lengths = rows_q.count, rows_k.count
    score_mod, mask_mod = bind(cfg.mods, args.mods, sequence, head * cfg.group, lengths, cfg.group)
    dropout = Dropout.of(cfg.mods, args.mods, sequence, head * cfg.group, cfg.group)
    captured = None
    if const_expr(cfg.mods is not None):
        captured = CapturedGrads.of(args.mods.captured, cfg, sequence, rows_k, extent(args.k), n_block)
    if const_expr(cfg.has_blocks):
        block_q, block_k = cfg.mods.block
        column, ratio = n_block // (block_k // tiles.tile_n), block_q * cfg.group // tiles.tile_m
        rows = rows_q.count * cfg.group
        exists = n_block * tiles.tile_n < rows_k.count if const_expr(cfg.lengths_vary) else None
        block_iter: BlockIterator = SparseBlocks.of(
            args.mods.blocks, sequence, head, column, ratio, rows, tiles.tile_m, exists
        )
    else:
        first, stop = mask.query_blocks(n_block)
        # Last rows first: all key blocks of a head see them, so deterministic additions follow closely.
        block_iter = ReverseRange(Blocks(first, first, stop, stop))
    work = Sm80BackwardWork(
        args=args,
        cfg=cfg,
        thread=cute.arch.thread_idx()[0],
        head=head,
        n_block=n_block,
        row_block=first_row_block(sequence, rows_q, extent(args.q), tiles.tile_m, cfg.group, cfg.varlen),
        rows_q=rows_q.count * cfg.group,
        rows_left=rows_k.count - n_block * tiles.tile_n,
        mask=mask,
        score_mod=score_mod,
        mask_mod=mask_mod,
        captured=captured,
        dropout=dropout,
        block_iter=block_iter,
        q=q,
        dout=dout,
        k=k,
        v=v,
        dk=dk,
        dv=dv,
    )
    if work.rows_left > 0:
        process_tile(work)


@cute.jit
def process_tile(work: Sm80BackwardWork):
    cfg, tiles = work.cfg, work.cfg.tiles
    memory = SharedMemory.allocate(cfg)
    products = make_products(work, memory)
    products.dk.fill(0.0)
    products.dv.fill(0.0)
    block_iter = work.block_iter
    if block_iter.any():
        load_keys(work, memory)
        load_queries(work, memory, block_iter.block(block_iter.start()), 0)
        if const_expr(cfg.has_blocks):
            block_iter = sparse_blocks(work.block_iter)
            for i in cutlass.range(block_iter.masked, unroll=1):
                step(work, memory, products, i, i, True)
            for i in cutlass.range(block_iter.count - block_iter.masked, unroll=1):
                step(work, memory, products, block_iter.masked + i, block_iter.masked + i, False)
        else:
            blocks = range_blocks(work.block_iter)
            for i in cutlass.range(blocks.stop - blocks.first, unroll=1):
                step(work, memory, products, blocks.stop - 1 - i, i, True)

    products.dk.store(products.dk.load() * work.args.softmax_scale)
    cute.arch.barrier()  # all threads have read K and V; dK and dV are staged over them
    if const_expr(cfg.deterministic):  # noqa: SIM102  one is decided at compile time
        if block_iter.any():
            release_order(work, block_iter.block(block_iter.last()))
    begin = work.n_block * tiles.tile_n
    for acc, staged, x, columns in (
        (products.dk, memory.k, work.dk, cfg.head_dim),
        (products.dv, memory.v, work.dv, cfg.head_dim_v),
    ):
        out_row = rows_of(x, begin, begin + work.rows_left)
        store_tile(acc, products.mma_kv, staged, out_row, work.thread, cfg.threads, columns)


def make_products(work: Sm80BackwardWork, memory: SharedMemory) -> Products:
    cfg, tiles, thread = work.cfg, work.cfg.tiles, work.thread
    mma_s, mma_kv, mma_q = (tiled_mma(cfg.dtype, *warps) for warps in (tiles.warps_s, tiles.warps_kv, tiles.warps_q))
    dk, dv = (
        cute.make_rmem_tensor(mma_kv.get_slice(thread).partition_shape_C((tiles.tile_n, columns)), Float32)
        for columns in (cfg.dim, cfg.dim_v)
    )
    return Products(
        mma_s=mma_s,
        q=operand_a(mma_s, memory.q, thread),
        k=operand_b(mma_s, memory.k, thread),
        do=operand_a(mma_s, memory.do, thread),
        v=operand_b(mma_s, memory.v, thread),
        mma_kv=mma_kv,
        pt=operand_a(mma_kv, transposed(memory.p), thread, transpose=True),
        dot=operand_b(mma_kv, transposed(memory.do), thread, transpose=True),
        dst=operand_a(mma_kv, transposed(memory.ds), thread, transpose=True),
        qt=operand_b(mma_kv, transposed(memory.q), thread, transpose=True),
        dv=dv,
        dk=dk,
        mma_q=mma_q,
        ds=operand_a(mma_q, memory.ds, thread),
        kt=operand_b(mma_q, transposed(memory.k), thread, transpose=True),
    )


def load_keys(work: Sm80BackwardWork, memory: SharedMemory) -> None:
    """Start loading K and V. They belong to the cp.async group of the first tile of queries."""
    cfg, n = work.cfg, work.cfg.tiles.tile_n
    for x, target, columns in ((work.k, memory.k, cfg.head_dim), (work.v, memory.v, cfg.head_dim_v)):
        dim = cute.size(target, mode=[1])
        copy = TileCopy(thread_tiling(async_copy(cfg.dtype), cfg.threads, dim), work.thread, n, dim, columns)
        copy.load_tile(cute.local_tile(x, (n, dim), (work.n_block, 0)), target, work.rows_left)


@cute.jit
def load_queries(work: Sm80BackwardWork, memory: SharedMemory, m_block: Int32, stage: Int32):
    """Start loading a tile of Q, dO and row statistics, as one cp.async group."""
    cfg, m = work.cfg, work.cfg.tiles.tile_m
    for x, staged, columns in ((work.q, memory.q, cfg.head_dim), (work.dout, memory.do, cfg.head_dim_v)):
        dim = cute.size(staged, mode=[1])
        copy = TileCopy(thread_tiling(async_copy(cfg.dtype), cfg.threads, dim), work.thread, m, dim, columns)
        copy.load_rows(rows_of(x, m_block * m, work.rows_q), staged[None, None, stage])
    atom = cute.make_copy_atom(cpasync.CopyG2SOp(), Float32, num_bits_per_copy=128)
    statistics, four = work.args.statistics, cute.make_layout(4)
    begin = cute.crd2idx((0, 0, work.row_block + m_block, work.head), statistics.layout)
    source = (statistics.iterator + begin + work.thread * 4).align(16)
    target = (memory.statistics.iterator + (stage * 2 * m + work.thread * 4)).align(16)
    if work.thread < 2 * m // 4:
        cute.copy(atom, cute.make_tensor(source, four), cute.make_tensor(target, four))
    cute.arch.cp_async_commit_group()


@cute.jit
def step(
    work: Sm80BackwardWork,
    memory: SharedMemory,
    products: Products,
    pos: Int32,
    iteration: Int32,
    masked: cutlass.Constexpr[bool],
):
    """Process the query tile at `pos` of the block iterator. iteration: its number. masked: a mask_mod may mask it."""
    cfg, stages, block_iter = work.cfg, work.cfg.tiles.stages, work.block_iter
    m_block, next_pos = block_iter.block(pos), block_iter.ahead(pos, 1)
    stage = iteration % stages if const_expr(stages > 1) else 0
    m, n = cfg.tiles.tile_m, cfg.tiles.tile_n
    if const_expr(work.dropout is not None):
        share_keep_bits(work, memory, m_block)  # the bits of the previous step have been read before its second barrier
    cute.arch.cp_async_wait_group(0)
    cute.arch.barrier()
    if const_expr(cfg.deterministic):  # noqa: SIM102  one is decided at compile time
        # Release the previous step here, not right after its additions: they are complete, so the release is fast.
        if iteration > 0:
            release_order(work, block_iter.block(block_iter.ahead(pos, -1)))
    if const_expr(stages > 1):  # noqa: SIM102  one is decided at compile time
        if block_iter.exists(next_pos):
            load_queries(work, memory, block_iter.block(next_pos), (iteration + 1) % stages)

    shape = products.mma_s.get_slice(0).partition_shape_C((m, n))
    s, dp = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
    s.fill(0.0)
    dp.fill(0.0)
    product(products.mma_s, s, products.q.at(stage), products.k)
    product(products.mma_s, dp, products.do.at(stage), products.v)
    compute_p_ds(work, memory, products.mma_s, s, dp, m_block, stage, masked)
    cute.arch.barrier()

    product(products.mma_kv, products.dv, products.pt, products.dot.at(stage))
    dq = cute.make_rmem_tensor(products.mma_q.get_slice(0).partition_shape_C((m, cfg.dim)), Float32)
    dq.fill(0.0)
    product(products.mma_q, dq, products.ds, products.kt)
    add_dq(work, dq, m_block)
    product(products.mma_kv, products.dk, products.dst, products.qt.at(stage))
    if const_expr(stages == 1):
        cute.arch.barrier()
        if block_iter.exists(next_pos):
            load_queries(work, memory, block_iter.block(next_pos), 0)


@cute.jit
def compute_p_ds(
    work: Sm80BackwardWork,
    memory: SharedMemory,
    mma: cute.TiledMma,
    s: cute.Tensor,
    dp: cute.Tensor,
    m_block: Int32,
    stage: Int32,
    masked: cutlass.Constexpr[bool],
):
    """Compute P and dS from S and dP, and store them to shared memory as 16-bit operands."""
    cfg, args, mask = work.cfg, work.args, work.mask
    grid = cute.make_identity_tensor((cfg.tiles.tile_m, cfg.tiles.tile_n))
    coords = rows_by_columns(mma.get_slice(work.thread).partition_C(grid))
    coords0 = rows_by_columns(mma.get_slice(0).partition_C(grid))
    fragment = mma_coords(coords, coords0, m_block * cfg.tiles.tile_m, work.n_block * cfg.tiles.tile_n)
    score_mod = None if const_expr(work.score_mod is None) else work.score_mod.at(fragment, args.softmax_scale)
    mask_mod = None if const_expr(work.mask_mod is None or not masked) else work.mask_mod.at(fragment)
    scoring = Scoring(args.score, score_mod, mask_mod)
    scores, grads = rows_by_columns(s), rows_by_columns(dp)
    rows, statistics = cute.size(scores, mode=[0]), memory.statistics
    dropout = None
    if const_expr(work.dropout is not None):
        dropout = dropout_factors(work, memory, coords, coords0)
        store_fragment_rows(grads, _multiply(fragment_rows(grads), dropout))
    for r in cutlass.range_constexpr(rows):
        grads[r, None].store(grads[r, None].load() + statistics[coords[r, 0][0], 1, stage])
    if const_expr(not scoring.is_plain):
        logits = scoring.logits(fragment_rows(scores))
        if const_expr(scoring.softcap is not None):
            store_fragment_rows(grads, scoring.times_softcap_grad(fragment_rows(grads), logits))
        store_fragment_rows(scores, scoring.masked(logits, lambda r, c: statistics[coords[r, 0][0], 0, stage]))
    if mask.needs_mask(m_block, work.n_block):
        mask.apply_mask(scores, coords, coords0, m_block, work.n_block)
    for r in cutlass.range_constexpr(rows):
        minus_lse = statistics[coords[r, 0][0], 0, stage]
        p = cute.math.exp2(scores[r, None].load() * args.scale_log2 + minus_lse, fastmath=True)
        scores[r, None].store(p)
        grads[r, None].store(grads[r, None].load() * p)
    if const_expr(score_mod is not None):
        store_fragment_rows(grads, scoring.score_grads(fragment_rows(scores), fragment_rows(grads)))
    if const_expr(work.captured is not None):
        work.captured.add(score_mod, fragment_rows(scores))
    if const_expr(dropout is not None):
        store_fragment_rows(scores, _multiply(fragment_rows(scores), dropout))
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cfg.dtype, num_bits_per_copy=32)
    to_smem = cute.make_tiled_copy_C(atom, mma).get_slice(work.thread)
    for acc, staged in ((s, memory.p), (dp, memory.ds)):
        half = cute.make_fragment_like(acc, cfg.dtype)
        half.store(acc.load().to(cfg.dtype))
        cute.copy(to_smem, to_smem.retile(half), to_smem.partition_D(staged))


def _multiply(x: list[list[Float32]], y: list[list[Float32]]) -> list[list[Float32]]:
    return [[a * b for a, b in zip(*rows)] for rows in zip(x, y)]


@cute.jit
def add_dq(work: Sm80BackwardWork, dq: cute.Tensor, m_block: Int32):
    """Add a tile of dQ to the accumulator, in the layout `config.Fragments`."""
    cfg, args = work.cfg, work.args
    block = work.row_block + m_block
    if const_expr(cfg.deterministic):
        # Earlier key blocks that see these rows add first. One thread waits on the semaphore, the barrier releases all.
        if const_expr(cfg.has_blocks):
            order_index = order_index_by_lists(args.ranks, cfg, block, work.head, work.n_block)
        else:
            order_index = work.n_block - work.mask.key_blocks(m_block).first
        semaphore = semaphore_ptr(args.semaphores, block, work.head)
        if work.thread == 0:
            wait_semaphore(semaphore, order_index)
        cute.arch.barrier()
    start = args.dq_sum.iterator + cute.crd2idx((0, block, work.head), args.dq_sum.layout) + work.thread
    for i in cutlass.range_constexpr(cute.size(dq)):
        cute.arch.red(start + i * cfg.threads, dq[i], op="add", dtype="f32", sem="relaxed", scope="gpu")


@cute.jit
def release_order(work: Sm80BackwardWork, m_block: Int32):
    """Let the next key block add to these rows. Call after `add_dq` and a barrier."""
    semaphore = semaphore_ptr(work.args.semaphores, work.row_block + m_block, work.head)
    if work.thread == 0:
        release_semaphore(semaphore)
