"""Launch of a warp-specialised forward kernel: the part that is the same on every chip with TMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..core.cache import CacheTensors
from ..core.order import Order, PackedOrder, sparse_block_order, tile_order
from ..core.sequence import Lengths, extent, seq_bounded_tma
from ..core.traced import ModTensors
from ..pipeline.kernel import Context, RoleKernel
from ..pipeline.tma import TmaMap, TmaTile
from . import plan
from .program import ForwardArguments, ForwardProgram
from .variant import ForwardVariant, KvLoad, OutStore


class Maps(NamedTuple):
    """TMA maps of matrices (rows, head_dim, heads, batch), varlen without batch; some are `seq_bounded_tma`."""

    q: TmaMap
    k: TmaMap | None  # k and v: None if TMA does not load them; with `KvLoad.ROWS` (pages, head_dim)
    v: TmaMap | None
    o: TmaMap | None  # None if O is stored without TMA


@dataclass(frozen=True)
class ForwardKernelArguments:
    """Run-time arguments of the kernel. Row mode of a matrix: (query), or with pack_gqa (head in group, query)."""

    maps: Maps
    k: cute.Tensor | None  # k and v: global memory, (rows of a page, columns, heads, pages), if TMA does not load them
    v: cute.Tensor | None
    out: cute.Tensor  # global memory, (rows, head_dim_v, heads, batch), varlen without batch; parts as in lse
    lse: cute.Tensor  # (rows, 1, heads, batch), varlen (rows, 1, heads); with split-KV, a last mode of parts
    sink: cute.Tensor | None  # (heads_q,), float32
    lengths: Lengths
    cache: CacheTensors | None
    order: Order | PackedOrder
    splits: Int32 | None  # parts per tile of `order`; None without split-KV
    part_blocks: Int32 | None  # key blocks of a part, the same for all tiles; None: each tile splits its own blocks
    scale_log2: Float32  # this and the next four: see `Scalars`
    to_natural: Float32
    scale_over_cap: Float32
    left: Int32
    right: Int32
    mods: ModTensors | None
    counter: cute.Tensor | None  # see `device.queue.CountedQueue`

    @property
    def tiles(self) -> Int32:
        """Number of work tiles; with split-KV each part is one."""
        return self.order.tiles if self.splits is None else self.order.tiles * self.splits

    @property
    def seqlen_q(self) -> Int32:
        """Sequence length of a dense problem."""
        return extent(self.maps.q.tensor)


@dataclass(frozen=True, slots=True)
class ForwardContext(Context):
    """Context of the roles. A chip's kernel narrows `cfg` to its own configuration."""

    args: ForwardKernelArguments
    cfg: ForwardVariant


Config = TypeVar("Config", bound=ForwardVariant)


@dataclass(frozen=True, slots=True, repr=False)
class ForwardKernel(ForwardProgram[Config], RoleKernel[Config]):
    """Base class of a chip's forward kernel."""

    def begin(self, call: ForwardArguments, cfg: Config, stream: Any) -> None:
        """Build the TMA maps and start the kernel."""
        sizes, scalars = call.sizes, plan.Scalars(*call.scalars)
        by_rows = cfg.kv_load is KvLoad.ROWS
        k, v = (_rows_of_pages(x) if by_rows else x for x in (call.k, call.v))
        ends_k = cfg.seq_bounded_k and not by_rows
        matrices = (call.q, cfg.seq_bounded_q), (k, ends_k), (v, ends_k), (call.out, cfg.seq_bounded_o)
        *loaded, stored = (seq_bounded_tma(x) if is_seq_bounded else x for x, is_seq_bounded in matrices)
        tiles = (cfg.q_tile, cfg.k_tile, cfg.v_tile)
        multicast = [cfg.sharers(name) for name in ("q", "k", "v")]
        parts = zip(loaded[: 2 + cfg.loads_v if cfg.has_kv_maps else 1], tiles, multicast)
        loads = [TmaTile.load(x, tile, cfg.tma_ctas, n).map for x, tile, n in parts]
        loads += [None] * (3 - len(loads))
        load_q, load_k, load_v = loads
        plain = (None, None) if cfg.has_kv_maps else (call.k, call.v)
        store_o = None if cfg.out_store is OutStore.DIRECT else TmaTile.store(stored, cfg.o_tile).map
        maps = Maps(load_q, load_k, load_v, store_o)
        # The last row blocks of a causal problem see the most keys, so the longest tiles start first.
        heads, cu_seqlens = cute.size(call.q, mode=[2]), call.lengths.cu_seqlens_q if cfg.has_packed_order else None
        order = tile_order(
            cfg.rows, cfg.rows_per_query, sizes.max_seqlen_q, extent(call.q), cu_seqlens, heads, sizes.batch,
            sizes.l2_group, descending=True, cluster=cfg.ctas,
            block_order=sparse_block_order(cfg, call.mods, 0, cfg.rows),
            most_l2_groups=sizes.most_l2_groups if cfg.merges_l2_groups else None,
        )  # fmt: skip
        splits = sizes.splits if cfg.split else None
        part_blocks = sizes.part_blocks if cfg.fixed_parts else None
        args = ForwardKernelArguments(
            maps, *plain, call.out, call.lse, call.sink, call.lengths, call.cache, order, splits, part_blocks,
            *scalars, call.mods, call.counter,
        )  # fmt: skip
        ctas = args.tiles * cfg.ctas
        self.start(args, cfg, cutlass.min(ctas, sizes.ctas // cfg.ctas * cfg.ctas) if cfg.persistent else ctas, stream)


def _rows_of_pages(x: cute.Tensor) -> cute.Tensor:
    """View k or v whose pages have one row, of one head, as (pages, columns)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[3, 1]))
