"""Arguments of the portable backward, and the work and shared memory of a CTA."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ..bwd.device.captured_grads import CapturedGrads
from ..core.constant import Constant
from ..core.dropout import Dropout
from ..core.mask import Band, BlockIterator, Blocks, ReverseRange, SparseBlocks
from ..core.order import Order, PackedOrder
from ..core.rows import first_row_block
from ..core.sequence import Lengths, extent, sequence_matrix
from ..core.traced import ModTensors, bind
from .config import Sm80BackwardConfig
from .loader import columns_from
from .tensor_core import segment, smem_layout


@dataclass(frozen=True)
class Sm80BackwardArguments:
    """Run-time arguments of the main kernel. Matrices have the modes of `core.sequence.as_matrices`, q and dout with
    packed heads. Workspaces have the modes of `bwd.row_tensors.RowTensors`."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    dout: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    statistics: cute.Tensor
    dq_sum: cute.Tensor
    semaphores: cute.Tensor | None
    ranks: cute.Tensor | None
    lengths: Lengths
    order: Order | PackedOrder
    left: Int32 | None
    right: Int32 | None
    scale_over_cap: Float32 | None  # softmax_scale / softcap
    softmax_scale: Float32
    scale_log2: Float32  # scale of the output of the softcap, in log2 units
    mods: ModTensors | None


class Sm80BackwardWork(Constant):
    """Work of a CTA: a tile of keys of one sequence and head, and a slice of the columns of the gradients. q, dout:
    (packed rows, dim). k, v, dk, dv: (rows, dim); dk and dv begin at the slice.

    row_block: first row block of the sequence in the workspaces. rows_left: keys from the start of the tile to the end
    of the sequence. block_iter: over tiles of query rows.
    """

    def __init__(self, args: Sm80BackwardArguments, cfg: Sm80BackwardConfig) -> None:
        self.args, self.cfg, slices = args, cfg, cfg.tiles.slices
        index, self.slice = Int32(cute.arch.block_idx()[0]), Int32(0)
        dk, dv = args.dk, args.dv
        if slices > 1:  # neighbours read the same tiles
            index, self.slice = index // slices, index % slices
            dk, dv = (columns_from(x, self.slice * width) for x, width in zip((dk, dv), cfg.slice_dims))
        self.n_block, self.head, sequence = args.order.at(index)
        rows_q = args.lengths.queries(sequence, extent(args.q))
        rows_k = args.lengths.keys(sequence, extent(args.k))
        self.q, self.dout = (sequence_matrix(x, self.head, sequence, rows_q, cfg.varlen) for x in (args.q, args.dout))
        self.k, self.v, self.dk, self.dv = (
            sequence_matrix(x, self.head, sequence, rows_k, cfg.varlen) for x in (args.k, args.v, dk, dv)
        )
        lengths, first_head = (rows_q.count, rows_k.count), self.head * cfg.group
        self.mask = Band(cfg.tile_m, cfg.cta_tile_n, *lengths, args.left, args.right, cfg.group)
        self.score_mod, self.mask_mod = bind(cfg.mods, args.mods, sequence, first_head, lengths, cfg.group)
        self.dropout, self.captured = Dropout.of(cfg.mods, args.mods, sequence, first_head, cfg.group), None
        if cfg.mods is not None:
            grads = args.mods.captured
            self.captured = CapturedGrads.of(grads, cfg, sequence, rows_k, extent(args.k), self.n_block)
        self.block_iter: BlockIterator
        if cfg.has_blocks:
            block_q, block_k = cfg.mods.block
            column, ratio = self.n_block // (block_k // cfg.cta_tile_n), block_q * cfg.group // cfg.tile_m
            rows = rows_q.count * cfg.group
            exists = self.n_block * cfg.cta_tile_n < rows_k.count if cfg.lengths_vary else None
            self.block_iter = SparseBlocks.of(
                args.mods.blocks, sequence, self.head, column, ratio, rows, cfg.tile_m, exists
            )
        else:
            first, stop = self.mask.query_blocks(self.n_block)
            # Last rows first: all key blocks of a head see them, so deterministic additions follow closely.
            self.block_iter = ReverseRange(Blocks(first, first, stop, stop))
        self.thread = cute.arch.thread_idx()[0]
        self.row_block = first_row_block(sequence, rows_q, extent(args.q), cfg.tile_m, cfg.group, cfg.varlen)
        self.rows_q = rows_q.count * cfg.group
        self.rows_left = rows_k.count - self.n_block * cfg.cta_tile_n


class SharedMemory(Constant):
    """Shared memory: 16-bit tiles (Q and dO with stages); row statistics (tile_m, 2, stages); dropout keep bits
    (tile_m, words per row), written before the first barrier of a step."""

    def __init__(self, cfg: Sm80BackwardConfig) -> None:
        m, n, stages, smem = cfg.tile_m, cfg.cta_tile_n, cfg.tiles.stages, SmemAllocator()

        def tile(*shape: int) -> cute.Tensor:
            return smem.allocate_tensor(cfg.dtype, smem_layout(*shape), 16 * segment(shape[1]))  # 8 rows of a segment

        self.k, self.v = tile(n, cfg.dim), tile(n, cfg.dim_v)
        self.q, self.do = tile(m, cfg.dim, stages), tile(m, cfg.dim_v, stages)
        self.p, self.ds = tile(m, n), tile(m, n)
        self.statistics = smem.allocate_tensor(Float32, cute.make_layout((m, 2, stages)), 128)
        if cfg.has_dropout:
            self.keep_bits = smem.allocate_tensor(Int32, cute.make_layout((m, cfg.tiles.keep_words_per_row)), 128)
