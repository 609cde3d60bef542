"""The launch of a forward of warp roles: what is the same on every chip that has TMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..core.arguments import Inputs, fake_matrices, fake_numbers, fake_rows
from ..core.order import Order
from ..core.sequence import Lengths, as_columns, as_matrices, extent, ragged
from ..pipeline.kernel import RoleKernel
from ..pipeline.tma import TmaMap, TmaTile
from .plan import Scalars, Sizes


class Maps(NamedTuple):
    """TMA maps of matrices (rows, head_dim, heads, batch), varlen without the batch, perhaps `ragged`."""

    q: TmaMap
    k: TmaMap
    v: TmaMap
    o: TmaMap


@dataclass(frozen=True)
class Arguments:
    """The kernel's run-time arguments. Rows of a matrix are (query) or, packed, (head in group, query)."""

    maps: Maps
    out: cute.Tensor  # plain memory, (rows, head_dim_v, heads, batch), or varlen without the batch
    lse: cute.Tensor  # (rows, 1, heads, batch), or varlen (rows, 1, heads)
    sink: cute.Tensor | None  # (heads_q,), float32
    lengths: Lengths
    order: Order
    scale_log2: Float32  # and below: see `Scalars`
    to_natural: Float32
    scale_over_cap: Float32
    left: Int32
    right: Int32

    @property
    def seqlen_q(self) -> Int32:
        """Of a dense problem."""
        return extent(self.maps.q.tensor)

    @property
    def seqlen_k(self) -> Int32:
        return extent(self.maps.k.tensor)


@dataclass(frozen=True, slots=True, repr=False)
class ForwardKernel(RoleKernel):
    """A chip's kernel. Its configurations are a `Variant` with `packed` heads, `rows` of a work tile, tiles of q, k, v
    and o, `ctas` that share a tile, which maps are `ragged_q`, `ragged_k` and `ragged_o`, and whether it is
    `persistent`."""

    @cute.jit
    def launch(
        self,
        inputs: Inputs,
        out: cute.Tensor,
        lse: cute.Tensor,
        scalars: Scalars,
        sizes: Sizes,
        cfg: cutlass.Constexpr,
        stream,
    ):
        """Build the TMA maps and start the kernel.

        Args:
            out: like q, with the columns of v.
            lse: (batch, heads, rows), or varlen (heads, rows); float32.
        """
        q, out = (as_matrices(x, cfg.packed) for x in (inputs.q, out))
        k, v = (as_matrices(x) for x in (inputs.k, inputs.v))
        lse = as_columns(lse, cfg.packed)
        of_sequences = ((q, cfg.ragged_q), (k, cfg.ragged_k), (v, cfg.ragged_k), (out, cfg.ragged_o))
        *loaded, stored = (ragged(x) if is_ragged else x for x, is_ragged in of_sequences)
        tiles = (cfg.q_tile, cfg.k_tile, cfg.v_tile)
        loads = [TmaTile.load(x, tile, cfg.ctas).map for x, tile in zip(loaded, tiles)]
        maps = Maps(*loads, TmaTile.store(stored, cfg.o_tile).map)
        m_blocks = cute.ceil_div(sizes.max_seqlen_q * cfg.packed, cfg.rows)
        heads = cute.size(q, mode=[2])
        # The last row blocks of a causal problem see the most keys, so the longest tiles start first.
        order = Order(m_blocks, heads, sizes.batch, sizes.section, descending=True, cluster=cfg.ctas)
        args = Arguments(maps, out, lse, inputs.sink, inputs.lengths, order, *scalars)
        self.start(args, cfg, order.grid(sizes.ctas) if cfg.persistent else order.ctas, stream)

    def stand_ins(self, cfg: Any) -> tuple:
        (out,) = fake_matrices(cfg, 1)
        return Inputs.fake(cfg), out, fake_rows(cfg), fake_numbers(Scalars), fake_numbers(Sizes)
