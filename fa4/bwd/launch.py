"""A backward of warp roles, from a specification to a launch: what is the same on every chip that has TMA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from torch import Tensor

from .. import jit
from ..core.arguments import Inputs, fake_matrices, fake_rows, windows
from ..core.order import Order
from ..core.sequence import Lengths, as_columns, as_matrices, ragged
from ..core.softmax import LOG2_E
from ..device import Chip
from ..pipeline.kernel import RoleKernel
from ..pipeline.tma import TmaMap, TmaTile
from ..spec import AttentionInputs, AttentionSpec, Extent, Gradients, Saved
from .blocks import RowBlocks, RowTensors
from .finish import launch_finish
from .statistics import launch_statistics
from .workspace import Workspace, modes_reversed


class Scalars(NamedTuple):
    """scale: softmax_scale. scale_log2: scale * log2(e); with a softcap, softcap * log2(e). scale_over_cap: scale /
    softcap. left, right: see `core.mask.Window`."""

    scale: Float32
    scale_log2: Float32
    scale_over_cap: Float32
    left: Int32
    right: Int32

    @staticmethod
    def of(spec: AttentionSpec) -> Scalars:
        scale = spec.softmax_scale
        over_cap = scale / spec.softcap if spec.softcap else 0.0
        return Scalars(scale, (spec.softcap or scale) * LOG2_E, over_cap, *windows(spec))


class Maps(NamedTuple):
    """TMA maps of matrices (rows, columns, heads, batch), varlen without the batch, perhaps `ragged`."""

    q: TmaMap
    k: TmaMap
    v: TmaMap
    do: TmaMap
    dk: TmaMap
    dv: TmaMap


@dataclass(frozen=True)
class Arguments:
    """The main kernel's run-time arguments."""

    maps: Maps
    statistics: cute.Tensor  # (tile_m, 2, blocks, heads_q): -lse * log2(e) and -delta of each row
    dq_sum: cute.Tensor  # (elements, blocks, heads_q): a block's dQ; see the chip's `placement`
    turns: cute.Tensor | None  # (blocks * turns, heads_q): how many key blocks have added to (a share of) dQ
    lengths: Lengths
    seqlen_q: Int32
    seqlen_k: Int32
    order: Order
    scale: Float32  # and below: see `Scalars`
    scale_log2: Float32
    scale_over_cap: Float32
    left: Int32
    right: Int32


@dataclass(frozen=True, slots=True)
class BackwardKernel(RoleKernel):
    """A chip's main kernel. Its configurations are a `bwd.variant.Variant`."""

    @cute.jit
    def launch(
        self,
        inputs: Inputs,
        saved: Saved,
        grads: Gradients,
        workspace: Workspace,
        scalars: Scalars,
        sizes: Extent,
        cfg: cutlass.Constexpr,
        stream,
    ):
        """Build the TMA maps and start the three kernels.

        Args:
            saved: out, dout like q with the columns of v; lse, dlse (batch, heads, rows), or varlen (heads, rows),
                float32.
            grads: dq, dk, dv like q, k, v.
            workspace: for `cfg.row_blocks`; on return its dsink holds the terms of dsink.
        """
        q, k, v, out, dout = (as_matrices(x) for x in (*inputs[:3], saved.out, saved.dout))
        dq, dk, dv = (as_matrices(x) for x in grads[:3])
        heads_q, heads_kv = cute.size(q, mode=[2]), cute.size(k, mode=[2])
        statistics, dq_sum, turns = (None if x is None else modes_reversed(x) for x in workspace[:3])
        statistics = cfg.arranged(statistics)
        lse, dlse, dsink = (None if x is None else as_columns(x) for x in (saved.lse, saved.dlse, workspace.dsink))
        blocks = Order(cute.ceil_div(sizes.max_seqlen_q, cfg.tile_m), heads_q, sizes.batch)
        rows = RowTensors(
            out, dout, dq, lse, dlse, inputs.sink, dsink, statistics, dq_sum, turns, inputs.lengths, blocks,
            scalars.scale,
        )  # fmt: skip
        launch_statistics(rows, cfg.row_blocks, stream)

        seqlens = cute.size(q, mode=[0]), cute.size(k, mode=[0])
        n_blocks = cute.ceil_div(sizes.max_seqlen_k, cfg.span)
        section = cfg.section(n_blocks, sizes.max_seqlen_q, heads_kv * sizes.batch)
        order = Order(n_blocks, heads_kv, sizes.batch, section, cfg.descending, cfg.ctas)
        loaded, stored = (q, k, v, dout), (dk, dv)
        if cutlass.const_expr(cfg.ragged):
            loaded, stored = tuple(ragged(x) for x in loaded), tuple(ragged(x) for x in stored)
        tiles = (cfg.q_tile, cfg.k_tile, cfg.v_tile, cfg.do_tile, cfg.dk_tile, cfg.dv_tile)
        maps = [TmaTile.load(x, tile, cfg.ctas).map for x, tile in zip(loaded, tiles)]
        maps += [TmaTile.store(x, tile).map for x, tile in zip(stored, tiles[4:])]
        args = Arguments(Maps(*maps), statistics, dq_sum, turns, inputs.lengths, *seqlens, order, *scalars)
        self.start(args, cfg, order.ctas, stream)
        launch_finish(rows, cfg.row_blocks, stream)

    def stand_ins(self, cfg: Any) -> tuple:
        out, dout, *grads = fake_matrices(cfg, 5)
        saved = Saved(out, fake_rows(cfg), dout, fake_rows(cfg, cfg.has_dlse))
        scalars = Scalars(Float32(0.0), Float32(0.0), Float32(0.0), Int32(0), Int32(0))
        workspace = Workspace.fake(cfg.row_blocks)
        return Inputs.fake(cfg), saved, Gradients(*grads), workspace, scalars, Extent(*[Int32(0)] * 3)


class Backward:
    """One kind of problem on a chip: its kernels, its launch."""

    kernel: BackwardKernel

    def __init__(self, spec: AttentionSpec, extent: Extent, chip: Chip) -> None:
        self.spec, self.extent, self.chip = spec, extent, chip
        self.scalars = Scalars.of(spec)
        self._compiled: dict[bool, tuple[RowBlocks, jit.Launcher]] = {}  # by whether there is a dlse

    def config(self, has_dlse: bool) -> Any:
        """The kernel's configuration."""
        raise NotImplementedError

    def launch(self, inputs: AttentionInputs, saved: Saved, grads: Gradients) -> Tensor | None:
        """Fill dq, dk, dv; returns the terms of dsink, (heads_q, ...), if there is a sink."""
        has_dlse = saved.dlse is not None
        if has_dlse not in self._compiled:
            cfg = self.config(has_dlse)
            self._compiled[has_dlse] = cfg.row_blocks, self.kernel.launcher(cfg, self.chip)
        row_blocks, launcher = self._compiled[has_dlse]
        workspace = Workspace.allocate(inputs, self.spec, row_blocks)
        launcher(inputs[:8], saved, grads, workspace, self.scalars, self.extent)
        return workspace.dsink_terms()
