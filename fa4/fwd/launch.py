"""A forward of warp roles, from a specification to a launch: what is the same on every chip that has TMA."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from torch import Tensor

from .. import jit
from ..core.arguments import Inputs, fake_matrices, fake_rows, windows
from ..core.order import Order
from ..core.sequence import Lengths, as_columns, as_matrices, extent, ragged
from ..core.softmax import LOG2_E
from ..device import Chip
from ..pipeline.kernel import RoleKernel
from ..pipeline.tma import TmaMap, TmaTile
from ..spec import AttentionInputs, AttentionSpec, Extent


class Scalars(NamedTuple):
    """scale_log2: softmax_scale * log2(e); with a softcap, softcap * log2(e). to_natural: turns a logit that was scaled
    by scale_log2 into natural units, undoing its rounding. scale_over_cap: softmax_scale / softcap. left, right: see
    `core.mask.Window`."""

    scale_log2: Float32
    to_natural: Float32
    scale_over_cap: Float32
    left: Int32
    right: Int32

    @staticmethod
    def of(spec: AttentionSpec) -> Scalars:
        scale = spec.softcap or spec.softmax_scale
        scale_log2 = ctypes.c_float(scale * LOG2_E).value
        over_cap = spec.softmax_scale / spec.softcap if spec.softcap else 0.0
        return Scalars(scale_log2, scale / scale_log2, over_cap, *windows(spec))


class Sizes(NamedTuple):
    """section: pairs of head and sequence that advance together, see `core.order`. ctas: as many as the chip runs at a
    time, the size of a persistent grid."""

    max_seqlen_q: Int32
    batch: Int32
    section: Int32
    ctas: Int32


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


@dataclass(frozen=True, slots=True)
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
        scalars = Scalars(Float32(0.0), Float32(0.0), Float32(0.0), Int32(0), Int32(0))
        return Inputs.fake(cfg), out, fake_rows(cfg), scalars, Sizes(*[Int32(0)] * 4)


class Forward:
    """One kind of problem on a chip: its kernel, its launch. section: see `Sizes`."""

    kernel: ForwardKernel

    def __init__(self, spec: AttentionSpec, extent: Extent, chip: Chip, cfg: Any, section: int) -> None:
        self.cfg, self.chip = cfg, chip
        self.scalars = Scalars.of(spec)
        self.sizes = Sizes(extent.max_seqlen_q, extent.batch, section, chip.sms)

    def launch(self, inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
        self._launcher(inputs[:8], out, lse, self.scalars, self.sizes)

    @functools.cached_property
    def _launcher(self) -> jit.Launcher:
        return self.kernel.launcher(self.cfg, self.chip)
