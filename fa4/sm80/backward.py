"""The portable backward: the page to read first. What it computes, from which records, in which launches.

A block of threads owns one tile of keys and walks the query rows that see it (`backward_tile`). With GQA the rows of
all heads of a group are packed, so dK and dV need no sum across blocks. dQ is added to a float32 sum in global memory;
the kernels of `fa4.bwd` go around: row statistics and zeros before, the sum's conversion to dq after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..bwd.program import BackwardProgram, Call
from ..core.mask import Window
from ..core.order import Order, PackedOrder, listed_order
from ..core.score import SoftcapAgain
from ..core.sequence import Lengths, extent
from ..core.traced import ModTensors
from .backward_tile import work_on_keys
from .config import BackwardConfig


@dataclass(frozen=True)
class Arguments:
    """The main kernel's run-time arguments. Matrices have the modes of `core.sequence.as_matrices`, those of q and
    dout with packed heads; the workspaces those of `bwd.blocks.RowTensors`."""

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
    window: Window
    score: SoftcapAgain | None
    softmax_scale: Float32
    scale_log2: Float32  # of what `score` gives
    mods: ModTensors | None


class BackwardKernel(BackwardProgram):
    __slots__ = ()

    def begin(self, call: Call, cfg: BackwardConfig, stream: Any) -> None:
        rows, scalars, sizes = call.rows, call.scalars, call.sizes
        score = SoftcapAgain(scalars.scale_over_cap) if cfg.has_softcap else None
        # First keys first: under a causal mask they take longest, and in a deterministic run their turn is first.
        n_blocks = cute.ceil_div(sizes.max_seqlen_k, cfg.tiles.tile_n)
        heads = cute.size(call.k, mode=[2])
        l2_group = cfg.l2_group(n_blocks, sizes.max_seqlen_q, heads * sizes.batch)
        listed = listed_order(cfg, call.mods.blocks, cfg.mods.block[1], cfg.cluster_tile_n) if cfg.has_blocks else None
        order: Order | PackedOrder = Order(n_blocks, heads, sizes.batch, l2_group, listed=listed)
        if cfg.counts_keys:
            bounds = rows.lengths.cu_seqlens_k
            order = PackedOrder(cfg.tiles.tile_n, 1, bounds, extent(call.k), heads, l2_group, False)
        args = Arguments(
            call.q, call.k, call.v, rows.dout, call.dk, call.dv, rows.statistics, rows.dq_sum, rows.semaphores, rows.ranks,
            rows.lengths, order, cfg.window(scalars.left, scalars.right), score, scalars.scale,
            scalars.scale_log2, call.mods,
        )  # fmt: skip
        kernel(args, cfg).launch(**cfg.launch(order.ctas), stream=stream)


@cute.kernel
def kernel(args: Arguments, cfg: cutlass.Constexpr[BackwardConfig]):
    work_on_keys(args, cfg)


KERNEL = BackwardKernel("sm80.backward")
