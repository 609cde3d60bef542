"""The portable backward. Read this module first: it has the launch.

A CTA owns one tile of keys and loops over the tiles of query rows that see it (`backward_tile`). With GQA the rows of
all heads of a group are packed, so dK and dV need no sum across CTAs. The widest heads are split: several CTAs compute
the scores of the same keys, and each a slice of the columns of dQ, dK and dV. dQ is added to a float32 accumulator in
global memory. Kernels of `fa4.bwd` run before (row statistics, zeros) and after (conversion of the accumulator to dq).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from ..bwd.program import BackwardArguments, BackwardProgram
from ..core.order import sparse_block_order, tile_order
from ..core.sequence import extent
from .backward_tile import kernel
from .backward_work import Sm80BackwardArguments
from .config import Sm80BackwardConfig


class BackwardKernel(BackwardProgram[Sm80BackwardConfig]):
    __slots__ = ()

    def begin(self, call: BackwardArguments, cfg: Sm80BackwardConfig, stream: Any) -> None:
        rows, scalars, sizes = call.rows, call.scalars, call.sizes
        scale_over_cap = scalars.scale_over_cap if cfg.has_softcap else None
        # First keys first: under a causal mask they take longest, and in a deterministic run they add first.
        n_blocks = cute.ceil_div(sizes.max_seqlen_k, cfg.tiles.tile_n)
        heads = cute.size(call.k, mode=[2])
        l2_group = cfg.l2_group(n_blocks, sizes.max_seqlen_q, heads * sizes.batch)
        cu_seqlens = rows.lengths.cu_seqlens_k if cfg.has_packed_order else None
        order = tile_order(
            cfg.tiles.tile_n, 1, sizes.max_seqlen_k, extent(call.k), cu_seqlens, heads, sizes.batch, l2_group,
            block_order=sparse_block_order(cfg, call.mods, 1, cfg.tiles.tile_n),
        )  # fmt: skip
        args = Sm80BackwardArguments(
            call.q, call.k, call.v, rows.dout, call.dk, call.dv, rows.statistics, rows.dq_sum, rows.semaphores,
            rows.ranks, rows.lengths, order, *cfg.window(scalars), scale_over_cap, scalars.scale, scalars.scale_log2,
            call.mods,
        )  # fmt: skip
        kernel(args, cfg).launch(**cfg.launch(order.ctas * cfg.tiles.slices), stream=stream)


KERNEL = BackwardKernel("sm80.backward")
