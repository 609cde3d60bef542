"""Work and shared memory of a CTA of the portable backward."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ..core.captured_grads import CapturedGrads
from ..core.constant import Constant
from ..core.dropout import Dropout
from ..core.mask import Band, BlockIterator
from ..core.traced import Traced
from .arguments import Sm80BackwardArguments
from .config import Sm80BackwardConfig
from .tensor_core import smem_layout


@dataclass(frozen=True)
class Sm80BackwardWork(Constant):
    """Work of a CTA: a tile of keys of one sequence and head. q, dout: (packed rows, dim). k, v, dk, dv: (rows, dim).

    row_block: first row block of the sequence in the workspaces.
    """

    args: Sm80BackwardArguments
    cfg: Sm80BackwardConfig
    thread: Int32
    head: Int32
    n_block: Int32
    row_block: Int32
    rows_q: Int32
    rows_left: Int32  # keys from the start of the tile to the end of the sequence
    mask: Band
    score_mod: Traced | None
    mask_mod: Traced | None
    captured: CapturedGrads | None
    dropout: Dropout | None
    block_iter: BlockIterator  # over tiles of query rows
    q: cute.Tensor
    dout: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor


@dataclass(frozen=True)
class SharedMemory(Constant):
    """Shared memory: 16-bit tiles (Q and dO with stages), row statistics, dropout keep bits."""

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    p: cute.Tensor
    ds: cute.Tensor
    statistics: cute.Tensor  # (tile_m, 2, stages)
    keep_bits: cute.Tensor | None  # (tile_m, words per row); written before the first barrier of a step

    @staticmethod
    def allocate(cfg: Sm80BackwardConfig) -> SharedMemory:
        m, n, stages, smem = cfg.tiles.tile_m, cfg.tiles.tile_n, cfg.tiles.stages, SmemAllocator()

        def tile(*shape):
            return smem.allocate_tensor(cfg.dtype, smem_layout(*shape), 1024)

        k, v, q, do = tile(n, cfg.dim), tile(n, cfg.dim_v), tile(m, cfg.dim, stages), tile(m, cfg.dim_v, stages)
        p, ds = tile(m, n), tile(m, n)
        statistics, keep_bits = smem.allocate_tensor(Float32, cute.make_layout((m, 2, stages)), 128), None
        if cfg.has_dropout:
            keep_bits = smem.allocate_tensor(Int32, cute.make_layout((m, cfg.tiles.keep_words_per_row)), 128)
        return SharedMemory(k, v, q, do, p, ds, statistics, keep_bits)
