"""The portable forward: the page to read first. From which records it is launched; what a block does is `forward_tile`.

A block of threads owns one tile of query rows and walks the key blocks that they see. With few queries the heads of a
group are packed into the rows of a tile, and the keys of a tile may be split among blocks, for `fwd.combine` to join.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..core.cache import CacheTensors
from ..core.mask import Window
from ..core.order import Order, PackedOrder, listed_order
from ..core.score import Softcap
from ..core.sequence import Lengths, extent
from ..core.traced import ModTensors
from ..fwd.program import Call, ForwardProgram
from .config import ForwardConfig
from .forward_tile import work_on_queries


class Scalars(NamedTuple):
    softmax_scale: Float32
    softcap: Float32
    left: Int32
    right: Int32


class LaunchSizes(NamedTuple):
    """section: (head, sequence) pairs that advance together, see `core.order`. splits: blocks that share a tile.
    part_blocks: key blocks of a part, where parts are `fixed`."""

    max_seqlen_q: Int32
    batch: Int32
    l2_group: Int32
    splits: Int32
    part_blocks: Int32


@dataclass(frozen=True)
class Arguments:
    """The kernel's run-time arguments. Matrices have the modes of `core.sequence.as_matrices`, those of q, out and lse
    with packed heads, those of out and lse with a last mode of parts if keys are split."""

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
    window: Window
    score: Softcap | None
    scale: Float32  # what turns the scores (or what `score` gives) into logits
    mods: ModTensors | None
    cache: CacheTensors | None


class ForwardKernel(ForwardProgram):
    __slots__ = ()
    scalars, sizes = Scalars, LaunchSizes

    def begin(self, call: Call, cfg: ForwardConfig, stream: Any) -> None:
        scalars, sizes = call.scalars, call.sizes
        score, scale = None, scalars.softmax_scale
        if cfg.has_softcap:
            score, scale = Softcap(scalars.softmax_scale / scalars.softcap), scalars.softcap
        window = cfg.window(scalars.left, scalars.right)
        # Last query rows first: under a causal mask they take longest.
        m_blocks = cute.ceil_div(sizes.max_seqlen_q * cfg.packed, cfg.tiles.tile_m)
        heads, listed = cute.size(call.q, mode=[2]), None
        if cfg.has_blocks:
            listed = listed_order(cfg, call.mods.blocks, cfg.mods.block[0], cfg.rows)
        order: Order | PackedOrder = Order(m_blocks, heads, sizes.batch, sizes.l2_group, descending=True, listed=listed)
        if cfg.varlen:
            bounds = call.lengths.cu_seqlens_q
            order = PackedOrder(cfg.tiles.tile_m, cfg.packed, bounds, extent(call.q), heads, sizes.l2_group)
        part_blocks = sizes.part_blocks if cfg.fixed_parts else None
        args = Arguments(
            *call[:7], order, sizes.splits, part_blocks, window, score, scale, call.mods, call.cache
        )  # fmt: skip
        kernel(args, cfg).launch(**cfg.launch(order.tiles * sizes.splits), stream=stream)


@cute.kernel
def kernel(args: Arguments, cfg: cutlass.Constexpr[ForwardConfig]):
    work_on_queries(args, cfg)


KERNEL = ForwardKernel("sm80.forward")
