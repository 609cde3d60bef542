"""The portable backward: the page to read first. What it computes, from which records, in which launches.

A block of threads owns one tile of keys and walks the query rows that see it (`backward_tile`). With GQA the rows of
all heads of a group are packed, so dK and dV need no sum across blocks. dQ is added to a float32 sum in global memory;
the kernels of `fa4.bwd` go around: row statistics and zeros before, the sum's conversion to dq after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .. import jit
from ..bwd.blocks import RowBlocks, RowTensors
from ..bwd.finish import launch_finish
from ..bwd.statistics import launch_statistics
from ..bwd.workspace import Workspace, modes_reversed
from ..core.arguments import Inputs
from ..core.constant import Constant
from ..core.mask import Window
from ..core.order import Order
from ..core.score import Softcap
from ..core.sequence import Lengths, as_columns, as_matrices
from ..core.softmax import LOG2_E
from ..core.variant import Variant
from ..device import Chip
from .backward_tile import work_on_keys
from .tiles import BackwardTiles, padded


@dataclass(frozen=True, slots=True)
class Fragments(Constant):
    """A `Placement` of a block's dQ as the warps' accumulators hold it (`tensor_core`): the i-th value of every thread,
    then the next, so that an addition of a warp covers 128 contiguous bytes. warps: their grid over rows and columns.
    """

    tile_m: int
    columns: int
    warps: tuple[int, int]
    rows: int = 1

    @property
    def elements(self) -> int:
        return self.tile_m * self.columns

    def offset(self, row: Int32 | int, first: int, within: Int32 | int) -> Int32 | int:
        column, (down, across) = first + within, self.warps
        warp = row // 16 % down + column // 8 % across * down
        thread = 32 * warp + row % 8 * 4 + column % 8 // 2
        repetition = row // (16 * down) + column // (8 * across) * (self.tile_m // (16 * down))
        value = 4 * repetition + row // 8 % 2 * 2 + column % 2
        return value * (32 * down * across) + thread


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardConfig(Variant):
    """What the generated code depends on, and so the compile key."""

    tiles: BackwardTiles

    @property
    def dim(self) -> int:
        return padded(self.head_dim)

    @property
    def dim_v(self) -> int:
        return padded(self.head_dim_v)

    @property
    def threads(self) -> int:
        return 32 * self.tiles.warps

    @property
    def row_blocks(self) -> RowBlocks:
        """What the kernels around the main one depend on."""
        return RowBlocks(
            self.dtype,
            self.head_dim,
            self.head_dim_v,
            self.tiles.tile_m,
            Fragments(self.tiles.tile_m, self.dim, self.tiles.warps_q),
            self.varlen,
            self.has_sink,
            self.has_dlse,
            packed=self.group,
            turns=1 if self.deterministic else 0,
        )


class Operands(NamedTuple):
    """q, k, v, out, dout: (batch, rows, heads, dim), or varlen (rows, heads, dim), the last stride 1. lse, dlse:
    (batch, heads, rows), or varlen (heads, rows), float32. sink: (heads_q,) float32."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    out: cute.Tensor
    dout: cute.Tensor
    lse: cute.Tensor
    dlse: cute.Tensor | None
    sink: cute.Tensor | None


class Results(NamedTuple):
    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor


class Sizes(NamedTuple):
    """section: (head, sequence) pairs that advance together, see `core.order`."""

    batch: Int32
    max_seqlen_q: Int32
    max_seqlen_k: Int32
    section: Int32


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
    turns: cute.Tensor | None
    lengths: Lengths
    order: Order
    window: Window
    score: Softcap | None
    softmax_scale: Float32
    scale_log2: Float32  # of what `score` gives


@cute.jit
def backward(
    operands: Operands,
    results: Results,
    workspace: Workspace,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    seqused_q: cute.Tensor | None,
    seqused_k: cute.Tensor | None,
    sizes: Sizes,
    window: Window,
    softmax_scale: Float32,
    softcap: Float32,
    cfg: cutlass.Constexpr[BackwardConfig],
    stream,
):
    """Launch the three kernels; on return the workspace's dsink holds the terms of the sink's gradient."""
    q, k, v, out, dout, lse, dlse, sink = operands
    q, out, dout, dq = (as_matrices(x, cfg.group) for x in (q, out, dout, results[0]))
    k, v, dk, dv = (as_matrices(x) for x in (k, v, *results[1:]))
    statistics, dq_sum, turns = (None if x is None else modes_reversed(x) for x in workspace[:3])
    lse, dlse, dsink = (None if x is None else as_columns(x, cfg.group) for x in (lse, dlse, workspace[3]))
    lengths, sizes = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), Sizes(*sizes)
    heads, tiles = cute.size(k, mode=[2]), cfg.tiles

    blocks = Order(cute.ceil_div(sizes.max_seqlen_q * cfg.group, tiles.tile_m), heads, sizes.batch)
    rows = RowTensors(out, dout, dq, lse, dlse, sink, dsink, statistics, dq_sum, turns, lengths, blocks, softmax_scale)
    launch_statistics(rows, cfg.row_blocks, stream)

    score, scale_log2 = None, softmax_scale * LOG2_E
    if cutlass.const_expr(cfg.has_softcap):
        score, scale_log2 = Softcap(softmax_scale / softcap), softcap * LOG2_E
    left, right = window
    window = Window(left if cfg.has_left else None, right if cfg.has_right else None)
    # First keys first: under a causal mask they take longest, and in a deterministic run their turn is first.
    order = Order(cute.ceil_div(sizes.max_seqlen_k, tiles.tile_n), heads, sizes.batch, sizes.section)
    args = Arguments(
        q, k, v, dout, dk, dv, statistics, dq_sum, turns, lengths, order, window, score, softmax_scale, scale_log2
    )
    kernel(args, cfg).launch(
        grid=[order.ctas, 1, 1],
        block=[cfg.threads, 1, 1],
        smem=tiles.smem_bytes(cfg.head_dim, cfg.head_dim_v),
        min_blocks_per_mp=tiles.blocks_per_sm,
        preferred_smem_carveout=100,
        stream=stream,
    )
    launch_finish(rows, cfg.row_blocks, stream)


@cute.kernel
def kernel(args: Arguments, cfg: cutlass.Constexpr[BackwardConfig]):
    work_on_keys(args, cfg)


def build(cfg: BackwardConfig, chip: Chip):
    """Compile the launcher, whose arguments are those of `backward` up to `softcap`."""

    def like_q():
        return jit.fake_tensor(cfg.dtype, 3 if cfg.varlen else 4)

    def like_lse(present: bool = True):
        return jit.fake_tensor(Float32, 2 if cfg.varlen else 3, align=4) if present else None

    sink = jit.fake_tensor(Float32, 1, align=4) if cfg.has_sink else None
    return jit.compile_kernel(
        backward,
        Operands(*(like_q() for _ in range(5)), like_lse(), like_lse(cfg.has_dlse), sink),
        Results(*(like_q() for _ in range(3))),
        Workspace.fake(cfg.row_blocks),
        *Inputs.fake(cfg)[4:],
        Sizes(*[Int32(0)] * 4),
        Window(Int32(0), Int32(0)),
        Float32(0),
        Float32(0),
        cfg,
        jit.current_stream(),
        chip=chip,
    )
