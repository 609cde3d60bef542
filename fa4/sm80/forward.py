"""The portable forward. Read this module first: it has the launch; `forward_tile` is the kernel body.

A CTA owns one tile of query rows and loops over the key blocks that they see. With few queries, heads of a group are
packed into the rows of a tile (pack_gqa), and several CTAs may share the keys of a tile (split-KV, see
`fwd.kernels.combine`).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

from ..core.order import sparse_block_order, tile_order
from ..core.sequence import extent
from ..fwd.program import ForwardArguments, ForwardProgram
from .config import Scalars, Sm80ForwardConfig
from .forward_tile import Sm80ForwardArguments, kernel


class ForwardKernel(ForwardProgram[Sm80ForwardConfig]):
    __slots__ = ()
    scalars = Scalars

    def begin(self, call: ForwardArguments, cfg: Sm80ForwardConfig, stream: Any) -> None:
        scalars, sizes = call.scalars, call.sizes
        scale_over_cap, scale = None, scalars.softmax_scale
        if cfg.has_softcap:
            scale_over_cap, scale = scalars.softmax_scale / scalars.softcap, scalars.softcap
        # Last query rows first: under a causal mask they take longest.
        heads, cu_seqlens = cute.size(call.q, mode=[2]), call.lengths.cu_seqlens_q if cfg.has_packed_order else None
        order = tile_order(
            cfg.rows, cfg.packed_heads, sizes.max_seqlen_q, extent(call.q), cu_seqlens, heads, sizes.batch,
            sizes.l2_group, descending=True, block_order=sparse_block_order(cfg, call.mods, 0, cfg.rows),
        )  # fmt: skip
        part_blocks = sizes.part_blocks if cfg.fixed_parts else None
        args = Sm80ForwardArguments(
            *call[:7], order, sizes.splits, part_blocks, *cfg.window(scalars), scale_over_cap, scale, call.mods,
            call.cache,
        )  # fmt: skip
        kernel(args, cfg).launch(**cfg.launch(order.tiles * sizes.splits * cfg.v_slices), stream=stream)


KERNEL = ForwardKernel("sm80.forward")
