"""Kernel body of the portable backward: one tile of keys, and the loop over the tiles of query rows that see it.

Per tile of query rows: S = Q K^T and dP = dO V^T, P = exp2(S - lse), dS = P (dP - delta); then dV += P^T dO,
dQ = dS K is added to a float32 accumulator in global memory, and dK += dS^T Q.

There are two barriers per tile. After the first, Q, dO and the statistics have arrived, and P, dS and the buffers of
the previous tile are free; loads of the next tile start here. After the second, P and dS are complete. Deterministic:
key blocks add to a tile of dQ in ascending order, ordered by a semaphore.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ..bwd.device.semaphores import release_semaphore, semaphore_ptr, wait_semaphore
from ..bwd.device.work import order_index_by_lists
from ..core.constant import Constant
from ..core.fragment_coords import fragment_rows, store_fragment_rows
from ..core.fragment_values import FragmentValues
from ..core.mask import range_blocks, sparse_blocks
from ..core.scoring import Scoring
from .backward_work import SharedMemory, Sm80BackwardArguments, Sm80BackwardWork
from .config import Sm80BackwardConfig
from .dropout import dropout_factors, share_keep_bits
from .loader import TileCopy, async_copy, rows_of, store_tile, thread_tiling
from .tensor_core import (
    column_slices,
    mma_coords,
    operand_a,
    operand_b,
    product,
    rows_by_columns,
    tiled_mma,
    transposed,
)


class Products(Constant):
    """Products of a step: tiled MMAs, operands in shared memory, and the accumulators dK and dV."""

    def __init__(self, work: Sm80BackwardWork, memory: SharedMemory) -> None:
        cfg, tiles, thread = work.cfg, work.cfg.tiles, work.thread
        # What the gradients' slice reads; scores read all columns.
        k, q, do = memory.k, memory.q, memory.do
        if tiles.slices > 1:
            k, q, do = (column_slices(x, tiles.slices) for x in (k, q, do))
        self.mma_s, self.mma_kv, self.mma_q = (
            tiled_mma(cfg.dtype, *warps) for warps in (tiles.warps_s, tiles.warps_kv, tiles.warps_q)
        )
        self.dk, self.dv = (
            cute.make_rmem_tensor(self.mma_kv.get_slice(thread).partition_shape_C((tiles.tile_n, columns)), Float32)
            for columns in cfg.slice_dims
        )
        # S = Q K^T and dP = dO V^T
        self.q, self.k = operand_a(self.mma_s, memory.q, thread), operand_b(self.mma_s, memory.k, thread)
        self.do, self.v = operand_a(self.mma_s, memory.do, thread), operand_b(self.mma_s, memory.v, thread)
        # dV = P^T dO and dK = dS^T Q
        self.pt = operand_a(self.mma_kv, transposed(memory.p), thread, transpose=True)
        self.dot = operand_b(self.mma_kv, transposed(do), thread, transpose=True)
        self.dst = operand_a(self.mma_kv, transposed(memory.ds), thread, transpose=True)
        self.qt = operand_b(self.mma_kv, transposed(q), thread, transpose=True)
        # dQ = dS K
        self.ds = operand_a(self.mma_q, memory.ds, thread)
        kt = operand_b(self.mma_q, transposed(k), thread, transpose=True)
        self.kt = kt if tiles.slices == 1 else kt.at(work.slice)


@cute.kernel
def kernel(args: Sm80BackwardArguments, cfg: cutlass.Constexpr[Sm80BackwardConfig]):
    """Find the work of this CTA and process it."""
    work = Sm80BackwardWork(args, cfg)
    if work.rows_left > 0:
        process_tile(work)


@cute.jit
def process_tile(work: Sm80BackwardWork):
    cfg, tiles = work.cfg, work.cfg.tiles
    memory = SharedMemory(cfg)
    products = Products(work, memory)
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
    for acc, staged, x, head_dim in (
        (products.dk, memory.k, work.dk, cfg.head_dim),
        (products.dv, memory.v, work.dv, cfg.head_dim_v),
    ):
        out_row, columns = rows_of(x, begin, begin + work.rows_left), head_dim
        if const_expr(tiles.slices > 1):
            staged = column_slices(staged, tiles.slices)[None, None, 0]
            columns = head_dim - work.slice * cute.size(staged, mode=[1])
        store_tile(acc, products.mma_kv, staged, out_row, work.thread, cfg.threads, columns)


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
    piece = stage if const_expr(cfg.tiles.slices == 1) else stage * cfg.tiles.slices + work.slice
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

    product(products.mma_kv, products.dv, products.pt, products.dot.at(piece))
    dq = cute.make_rmem_tensor(products.mma_q.get_slice(0).partition_shape_C((m, cfg.slice_dims[0])), Float32)
    dq.fill(0.0)
    product(products.mma_q, dq, products.ds, products.kt)
    add_dq(work, dq, m_block)
    product(products.mma_kv, products.dk, products.dst, products.qt.at(piece))
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
    scoring = Scoring(args.scale_over_cap, score_mod, mask_mod)
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
        if const_expr(cfg.has_softcap):
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
        add_captured(work, score_mod, scores)
    if const_expr(dropout is not None):
        store_fragment_rows(scores, _multiply(fragment_rows(scores), dropout))
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), cfg.dtype, num_bits_per_copy=32)
    to_smem = cute.make_tiled_copy_C(atom, mma).get_slice(work.thread)
    for acc, staged in ((s, memory.p), (dp, memory.ds)):
        half = cute.make_fragment_like(acc, cfg.dtype)
        half.store(acc.load().to(cfg.dtype))
        cute.copy(to_smem, to_smem.retile(half), to_smem.partition_D(staged))


@cute.jit
def add_captured(work: Sm80BackwardWork, score_mod: FragmentValues, p: cute.Tensor):
    """Add to the gradients of captured tensors. All slices compute the same; the first adds."""
    if const_expr(work.cfg.tiles.slices == 1):
        work.captured.add(score_mod, fragment_rows(p))
    else:  # one condition is decided at compile time
        if work.slice == 0:
            work.captured.add(score_mod, fragment_rows(p))


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
        semaphore = semaphore_ptr(args.semaphores, block * cfg.tiles.slices + work.slice, work.head)
        if work.thread == 0:
            wait_semaphore(semaphore, order_index)
        cute.arch.barrier()
    start = args.dq_sum.iterator + cute.crd2idx((0, block, work.head), args.dq_sum.layout) + work.thread
    if const_expr(cfg.tiles.slices > 1):
        start = start + work.slice * cfg.tile_m * cfg.slice_dims[0]
    for i in cutlass.range_constexpr(cute.size(dq)):
        cute.arch.red(start + i * cfg.threads, dq[i], op="add", dtype="f32", sem="relaxed", scope="gpu")


@cute.jit
def release_order(work: Sm80BackwardWork, m_block: Int32):
    """Let the next key block add to these rows. Call after `add_dq` and a barrier."""
    index = (work.row_block + m_block) * work.cfg.tiles.slices + work.slice
    semaphore = semaphore_ptr(work.args.semaphores, index, work.head)
    if work.thread == 0:
        release_semaphore(semaphore)
