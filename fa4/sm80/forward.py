"""The portable forward: the page to read first. From which records it is launched; what a block does is `forward_tile`.

A block of threads owns one tile of query rows and walks the key blocks that they see. With few queries the heads of a
group are packed into the rows of a tile, and the keys of a tile may be split among blocks, for `fwd.combine` to join.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import jit
from ..core.arguments import Inputs
from ..core.mask import Window
from ..core.order import Order
from ..core.score import Softcap
from ..core.sequence import Lengths, align_strides, as_columns, as_matrices
from ..core.variant import Variant
from ..device import Chip
from .forward_tile import work_on_queries
from .tiles import ForwardTiles, padded


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardConfig(Variant):
    """What the generated code depends on, and so the compile key.

    packed: heads of a group that are rows of one tile: all or 1. split: the keys of a tile are shared among blocks; out
    and lse have a leading axis of parts and are float32, and there is no sink.
    """

    tiles: ForwardTiles
    packed: int = 1
    split: bool = False

    @property
    def dim(self) -> int:
        return padded(self.head_dim)

    @property
    def dim_v(self) -> int:
        return padded(self.head_dim_v)

    @property
    def threads(self) -> int:
        return 32 * self.tiles.warps


class Operands(NamedTuple):
    """q, k, v, out: (batch, rows, heads, dim), or varlen (rows, heads, dim), the last stride 1. lse: (batch, heads,
    rows), or varlen (heads, rows), float32. sink: (heads_q,) float32."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    sink: cute.Tensor | None


class Sizes(NamedTuple):
    """section: (head, sequence) pairs that advance together, see `core.order`. splits: blocks that share a tile."""

    batch: Int32
    max_seqlen_q: Int32
    section: Int32
    splits: Int32


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
    order: Order
    splits: Int32
    window: Window
    score: Softcap | None
    scale: Float32  # what turns the scores (or what `score` gives) into logits


@cute.jit
def forward(
    operands: Operands,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    seqused_q: cute.Tensor | None,
    seqused_k: cute.Tensor | None,
    sizes: Sizes,
    window: Window,
    softmax_scale: Float32,
    softcap: Float32,
    cfg: cutlass.Constexpr[ForwardConfig],
    stream,
):
    """Launch the kernel."""
    q, k, v, out, lse, sink = operands
    batch, max_seqlen_q, section, splits = sizes
    q, k, v = as_matrices(q, cfg.packed), as_matrices(k), as_matrices(v)
    out, lse = _results(align_strides(out), as_matrices, cfg), _results(lse, as_columns, cfg)
    score, scale = None, softmax_scale
    if cutlass.const_expr(cfg.has_softcap):
        score, scale = Softcap(softmax_scale / softcap), softcap
    left, right = window
    window = Window(left if cfg.has_left else None, right if cfg.has_right else None)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    # Last query rows first: under a causal mask they take longest.
    m_blocks = cute.ceil_div(max_seqlen_q * cfg.packed, cfg.tiles.tile_m)
    order = Order(m_blocks, cute.size(q, mode=[2]), batch, section, descending=True)
    kernel(Arguments(q, k, v, out, lse, sink, lengths, order, splits, window, score, scale), cfg).launch(
        grid=[order.tiles * splits, 1, 1],
        block=[cfg.threads, 1, 1],
        smem=cfg.tiles.smem_bytes(cfg.head_dim, cfg.head_dim_v),
        min_blocks_per_mp=cfg.tiles.blocks_per_sm,
        preferred_smem_carveout=100,
        stream=stream,
    )


@cute.kernel
def kernel(args: Arguments, cfg: cutlass.Constexpr[ForwardConfig]):
    work_on_queries(args, cfg)


def _results(x: cute.Tensor, as_views, cfg: ForwardConfig) -> cute.Tensor:
    """out or lse by `as_views`; an axis of parts in front becomes the last mode."""
    if not cfg.split:
        return as_views(x, cfg.packed)
    one = as_views(x[(0, *[None] * (cute.rank(x) - 1))], cfg.packed)
    layout = cute.make_layout((*one.shape, x.shape[0]), stride=(*one.stride, x.stride[0]))
    return cute.make_tensor(x.iterator, layout)


def build(cfg: ForwardConfig, chip: Chip):
    """Compile the launcher, whose arguments are those of `forward` up to `softcap`."""
    rank = 3 if cfg.varlen else 4
    q, k, v = (jit.fake_tensor(cfg.dtype, rank) for _ in range(3))
    out = jit.fake_tensor(Float32, rank + 1) if cfg.split else jit.fake_tensor(cfg.dtype, rank)
    lse = jit.fake_tensor(Float32, rank if cfg.split else rank - 1, contiguous=True, align=4)
    sink = jit.fake_tensor(Float32, 1, align=4) if cfg.has_sink else None
    return jit.compile_kernel(
        forward,
        Operands(q, k, v, out, lse, sink),
        *Inputs.fake(cfg)[4:],
        Sizes(*[Int32(0)] * 4),
        Window(Int32(0), Int32(0)),
        Float32(0),
        Float32(0),
        cfg,
        jit.current_stream(),
        chip=chip,
    )
