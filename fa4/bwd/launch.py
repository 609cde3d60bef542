"""Launch of a warp-specialised backward kernel: the part that is the same on every chip with TMA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import cutlass.cute as cute
from cutlass import Float32, Int32

from ..core.order import Order, PackedOrder, sparse_block_order, tile_order
from ..core.sequence import Lengths, seq_bounded_tma
from ..core.traced import ModTensors
from ..pipeline.kernel import Context, RoleKernel
from ..pipeline.smem import Tile
from ..pipeline.tma import TmaMap, TmaTile
from ..runtime.spec import BlockScales
from .kernels.key_sums import launch_key_sums
from .program import BackwardArguments, BackwardProgram
from .variant import BackwardVariant


class Maps(NamedTuple):
    """TMA maps of matrices (rows, columns, heads, batch), varlen without batch; `seq_bounded_tma` if lengths vary."""

    q: TmaMap
    k: TmaMap
    v: TmaMap
    do: TmaMap
    dk: TmaMap
    dv: TmaMap
    dq: TmaMap | None = None  # if `cfg.dq_tile`


@dataclass(frozen=True)
class BackwardKernelArguments:
    """Run-time arguments of the main kernel."""

    maps: NamedTuple  # `Maps`, or a chip's record
    statistics: cute.Tensor  # (tile_m, 2, blocks, heads_q): -lse * log2(e) and -delta of each row
    dq_sum: cute.Tensor | None  # (elements, blocks, heads_q): dQ sum of a block, see `RowTensors`
    semaphores: cute.Tensor | None  # (blocks * semaphores, heads_q): key blocks that have added to (a share of) dQ
    ranks: cute.Tensor | None  # (key blocks, blocks, heads_q): see `ranks`
    key_sums: cute.Tensor | None  # (elements, key blocks, heads_kv, batch, parts): see `kernels.key_sums`
    lengths: Lengths
    seqlen_q: Int32
    seqlen_k: Int32
    order: Order | PackedOrder
    scale: Float32  # this and the next four: see `Scalars`
    scale_log2: Float32
    scale_over_cap: Float32
    left: Int32
    right: Int32
    factors: cute.Tensor | None  # this and scales: of `spec.GradientOperands`
    scales: BlockScales | None  # in the layout of the chip's kernel, (batch, heads, tiles, bytes)
    mods: ModTensors | None


@dataclass(frozen=True, slots=True)
class BackwardContext(Context):
    """Context of the roles. A chip's kernel narrows `cfg` to its own configuration."""

    args: BackwardKernelArguments
    cfg: BackwardVariant

    @property
    def first_reduce_warp(self) -> int:
        return self.channels.roles["reduce"].warps[0]


Config = TypeVar("Config", bound=BackwardVariant)


@dataclass(frozen=True, slots=True, repr=False)
class BackwardKernel(BackwardProgram[Config], RoleKernel[Config]):
    """Base class of a chip's main kernel."""

    def begin(self, call: BackwardArguments, cfg: Config, stream: Any) -> None:
        """Build the TMA maps and start the kernel."""
        order = key_block_order(call, cfg)
        loaded, stored = (call.q, call.k, call.v, call.dout), [call.dk, call.dv]
        tiles = [cfg.q_tile, cfg.k_tile, cfg.v_tile, cfg.do_tile, cfg.dk_tile, cfg.dv_tile]
        if cfg.dq_tile is not None:
            stored.append(call.rows.dq)
            tiles.append(cfg.dq_tile)
        maps = Maps(*tma_maps(cfg, loaded, stored, tiles))
        self.start(kernel_arguments(call, maps, order), cfg, order.ctas, stream)

    def end(self, call: BackwardArguments, cfg: Config, stream: Any) -> None:
        sums = call.rows.key_sums
        if sums is not None:
            launch_key_sums(call.dv, call.dk, sums, call.scalars.scale, cfg.row_blocks, stream)


def key_block_order(call: BackwardArguments, cfg: BackwardVariant) -> Order | PackedOrder:
    """Return the launch order of key blocks. If CTAs share a key block, each part counts as a head."""
    rows, sizes, seqlen_k = call.rows, call.sizes, cute.size(call.k, mode=[0])
    n_blocks = cute.ceil_div(sizes.max_seqlen_k, cfg.cluster_tile_n)
    heads = cute.size(call.k, mode=[2]) * (1 if rows.key_sums is None else cute.size(rows.key_sums, mode=[4]))
    pairs = heads * sizes.batch
    l2_group = cfg.l2_group(n_blocks, sizes.max_seqlen_q, pairs)
    wave = cfg.wave(n_blocks, l2_group, pairs)
    cu_seqlens = rows.lengths.cu_seqlens_k if cfg.has_packed_order else None
    return tile_order(
        cfg.cluster_tile_n, 1, sizes.max_seqlen_k, seqlen_k, cu_seqlens, heads, sizes.batch, l2_group,
        descending=cfg.descending, cluster=cfg.ctas, wave=wave,
        block_order=sparse_block_order(cfg, call.mods, 1, cfg.cluster_tile_n),
    )  # fmt: skip


def tma_maps(
    cfg: BackwardVariant, loaded: Sequence[cute.Tensor], stored: Sequence[cute.Tensor], tiles: Sequence[Tile]
) -> list[TmaMap]:
    """Return the TMA maps of q, k, v and dout to load, then those of the gradients to store. tiles: of each map."""
    if cfg.lengths_vary:
        loaded, stored = [seq_bounded_tma(x) for x in loaded], [seq_bounded_tma(x) for x in stored]
    multicast = [cfg.sharers(name) for name in ("q", "k", "v", "do")]
    maps = [TmaTile.load(x, tile, cfg.tma_ctas, n).map for x, tile, n in zip(loaded, tiles, multicast)]
    return maps + [TmaTile.store(x, tile).map for x, tile in zip(stored, tiles[len(loaded) :])]


def kernel_arguments(call: BackwardArguments, maps: NamedTuple, order: Order | PackedOrder) -> BackwardKernelArguments:
    """Return the run-time arguments of a main kernel."""
    rows, seqlens = call.rows, (cute.size(call.q, mode=[0]), cute.size(call.k, mode=[0]))
    sums = rows.statistics, rows.dq_sum, rows.semaphores, rows.ranks, rows.key_sums
    factors = rows.factors, call.scales
    return BackwardKernelArguments(maps, *sums, rows.lengths, *seqlens, order, *call.scalars, *factors, call.mods)
