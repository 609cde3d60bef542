"""Stores of dV and dK that both kernels share: from registers to shared memory, from there to global memory."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from ....core.sequence import sequence_matrix
from ....pipeline.fragment import pack_pairs, store_matrices
from ....pipeline.roles import ROWS_PER_WARP, WARPS_PER_WARPGROUP
from ....pipeline.smem import PANEL_ROW_BYTES, Tile
from ....pipeline.tma import tma_start_store
from .context import Sm90StepsContext
from .work import Sm90BackwardWork


def to_smem(cfg, base: Int32, tile: Tile, gradient: cute.Tensor, scale: Float32) -> None:
    """Store a warpgroup's accumulator, times `scale`, to shared memory."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % WARPS_PER_WARPGROUP
    address = base + warp * (ROWS_PER_WARP * PANEL_ROW_BYTES)
    store_matrices(address, tile, pack_pairs(gradient, [scale, scale], cfg.dtype))


def store(context: Sm90StepsContext, work: Sm90BackwardWork, name: str, block: Int32, ptr: cute.Pointer) -> None:
    """One warp: start the TMA store of a consumer's gradient of a block of 64 keys."""
    tma = context.tma(name)
    matrix = sequence_matrix(tma.tensor, work.head_kv, work.batch, work.k, context.cfg.varlen, context.cfg.lengths_vary)
    tma_start_store(tma, matrix, block, ptr)
