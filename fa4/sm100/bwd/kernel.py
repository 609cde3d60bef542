"""The Blackwell backward: the page to read first. Who does what, who hands what to whom, and where things lie.

A CTA owns a block of 128 keys and walks the query blocks that see it, for each query head of the group in turn, so
that dK and dV grow in tensor memory and are written once. Per step, on transposed scores (a lane is a key):
S^T = K Q^T and dP^T = V dO^T; P^T and dS^T go back over them in 16 bits and are left operands of dV += P^T dO and
dK += dS^T Q; dQ = dS K leaves through shared memory as an addition to a float32 accumulator. Two small kernels go
around it: row statistics and a cleared accumulator before, the accumulator's conversion to dQ after.

Two CTAs may work as a pair (`cfg.ctas`, see `config`): 256 keys, every product computed by both at once with the right
operand split between their shared memories, and the halves of dS exchanged, so that each adds half of the queries' dQ.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...bwd.blocks import RowTensors
from ...bwd.finish import launch_finish
from ...bwd.statistics import launch_statistics
from ...bwd.workspace import Workspace
from ...core.order import Order
from ...core.sequence import Lengths, as_columns, as_matrices, ragged
from ...pipeline import kernel as kernels
from ...pipeline.channels import ONCE, Across, By, Carries, Channel, ChannelTable, Implied
from ...pipeline.roles import Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from ...pipeline.tma import TmaTile
from .. import tmem
from ..signals import SIGNALS
from .compute import compute
from .config import CHUNK_BYTES, DQ_STAGES, ROW_STAGES, Config
from .load import load
from .mma import mma
from .reduce import reduce

ROLES = RoleTable(
    (
        Role("compute", warps=(0, 8), regs=168, body=compute),
        Role("reduce", warps=(8, 12), regs=96, body=reduce),
        Role("mma", warps=(12, 13), regs=80, body=mma),
        Role("load", warps=(13, 14), regs=80, body=load),
    )
)
TMEM_AND_SMEM = Carries.TMEM | Carries.ASYNC_SMEM  # dS: for dK and for dQ


def tmem_map(cfg: Config) -> tmem.TmemMap:
    """P and dS lie over S and dP in two packed halves, one at each end; dQ lies over dP unless head dims leave it a
    place, a pair's between the halves of dS."""
    dp = cfg.tile_m + cfg.columns_v
    dk = dp + cfg.tile_m
    spans = dict(
        S=tmem.cols(0, cfg.tile_m),
        P=tmem.alias_of("S", columns=cfg.tile_m),
        dV=tmem.cols(cfg.tile_m, cfg.columns_v),
        dP=tmem.cols(dp, cfg.tile_m),
        dS=tmem.alias_of("dP", columns=cfg.tile_m),
        dK=tmem.cols(dk, cfg.columns),
    )
    if cfg.dq_over_dp and not cfg.dq_transposed:
        between = cfg.tile_m // 4 if cfg.ctas == 2 else 0
        spans.update(dQ=tmem.alias_of("dP", columns=cfg.dq_columns, offset=between))
    else:
        spans.update(dQ=tmem.cols(dk + cfg.columns, cfg.dq_columns))
    if cfg.dq_transposed:
        spans.update(dQ_high=tmem.alias_of("dP", columns=cfg.tile_m))
    return tmem.TmemMap(**spans)


def channels(cfg: Config) -> ChannelTable:
    """<producer>_<consumer>_<payload>. All but the row statistics' go across a pair."""
    across = Across.PAIR if cfg.ctas == 2 else Across.NOTHING

    def channel(name, producer, consumer, filled, freed, stages, carries) -> Channel:
        return Channel(name, producer, consumer, filled, freed, stages, carries, cfg.ctas, across)

    columns = ()
    if cfg.ctas == 2:
        columns = (
            channel("load_mma_Kcolumns", "load", "mma", By.TMA, ONCE, 1, Carries.ASYNC_SMEM),
            channel("load_mma_Qcolumns", "load", "mma", By.TMA, By.UMMA, 1, Carries.ASYNC_SMEM),
            channel("load_mma_dOcolumns", "load", "mma", By.TMA, By.UMMA, 1, Carries.ASYNC_SMEM),
        )
    # Compute has read the statistics before it writes the dS that dK = dS Q takes, and this Q is then freed.
    q_of_dk = Implied("load_mma_Qcolumns" if cfg.ctas == 2 else "load_mma_Q", "free")
    return ChannelTable(
        (
            channel("load_mma_K", "load", "mma", By.TMA, ONCE, 1, Carries.ASYNC_SMEM),
            channel("load_mma_V", "load", "mma", By.TMA, ONCE, 1, Carries.ASYNC_SMEM),
            channel("load_mma_Q", "load", "mma", By.TMA, By.UMMA, cfg.q_stages, Carries.ASYNC_SMEM),
            channel("load_mma_dO", "load", "mma", By.TMA, By.UMMA, cfg.do_stages, Carries.ASYNC_SMEM),
            *columns,
            Channel("load_compute_rows", "load", "compute", By.TMA, q_of_dk, ROW_STAGES, Carries.SMEM),
            # S and dP are free again when the products that read P and dS, written over them, have been issued: the
            # matrix unit works in order.
            channel("mma_compute_S", "mma", "compute", By.UMMA, Implied("compute_mma_P"), 1, Carries.TMEM),
            channel("mma_compute_dP", "mma", "compute", By.UMMA, Implied("compute_mma_dS"), 1, Carries.TMEM),
            # P has been read when the next S is full, dS when the next dP is: dQ, which reads it, was issued before.
            channel("compute_mma_P", "compute", "mma", By.WARP, Implied("mma_compute_S"), 1, Carries.TMEM),
            channel("compute_mma_dS", "compute", "mma", By.WARP, Implied("mma_compute_dP"), 1, TMEM_AND_SMEM),
            channel("mma_reduce_dQ", "mma", "reduce", By.UMMA, By.WARP, 1, Carries.TMEM),
            channel("mma_compute_dV", "mma", "compute", By.UMMA, ONCE, 1, Carries.TMEM),
            channel("mma_compute_dK", "mma", "compute", By.UMMA, ONCE, 1, Carries.TMEM),
        ),
        ROLES,
        SIGNALS,
    )


def smem_map(cfg: Config, table: ChannelTable) -> SmemMap:
    columns = ()
    if cfg.ctas == 2:
        columns = (
            Region("Kcolumns", cfg.k_columns.nbytes, align=1024),
            Region("Qcolumns", cfg.q_columns.nbytes, align=1024),
            Region("dOcolumns", cfg.do_columns.nbytes, align=1024),
        )
    return SmemMap(
        Region("K", cfg.k_tile.nbytes, align=1024),
        Region("V", cfg.v_tile.nbytes, align=1024),
        Region("Q", cfg.q_stages * cfg.q_tile.nbytes, align=1024),
        Region("dO", cfg.do_stages * cfg.do_tile.nbytes, align=1024),
        *columns,
        Region("dS", cfg.ds_tile.nbytes, align=1024),
        Region("dQ", DQ_STAGES * CHUNK_BYTES, align=128),
        Region("rows", ROW_STAGES * cfg.rows_bytes, align=128),
        Region("barriers", table.nbytes, align=8),
        Region("tmem", 4),
        Region("zero", 4),  # see `mma.place`
    )


@dataclass(frozen=True)
class Tensors:
    """The kernels' run-time arguments. TMA tensors have the modes (rows, columns, heads, batch), or are `ragged`."""

    q_atom: cute.CopyAtom
    q: cute.Tensor
    k_atom: cute.CopyAtom
    k: cute.Tensor
    v_atom: cute.CopyAtom
    v: cute.Tensor
    do_atom: cute.CopyAtom
    do: cute.Tensor
    dk_atom: cute.CopyAtom
    dk: cute.Tensor
    dv_atom: cute.CopyAtom
    dv: cute.Tensor
    statistics: cute.Tensor  # (tile_m, 2, blocks, heads_q): -lse * log2(e) and -delta of each row
    dq_sum: cute.Tensor  # (tile_m * columns, blocks, heads_q): a block's dQ; see `placement`
    turns: cute.Tensor | None  # (blocks * ctas, heads_q): how many key blocks have added to (a share of) dQ
    lengths: Lengths
    seqlen_q: Int32
    seqlen_k: Int32
    order: Order
    scale: Float32
    scale_log2: Float32  # scale * log2(e); with a softcap, softcap * log2(e)
    scale_over_cap: Float32  # scale / softcap
    left: Int32
    right: Int32


@dataclass(frozen=True, slots=True)
class Context(kernels.Context):
    """What a role's body gets."""

    tmem: tmem.TmemMap | None = None
    first_reduce_warp: int = ROLES["reduce"].warps[0]
    dq_staging: int = 1  # named barriers; 0 is the CTA's
    gradient_staged: int = 2  # and 3: one for each warpgroup of compute

    @staticmethod
    def of(args: Tensors, cfg: Config) -> Context:
        table = channels(cfg)
        memory = tmem.TensorMemory(ROLES["reduce"].warps[0], cfg.ctas)
        return Context(args, cfg, table, smem_map(cfg, table), memory, cfg.ctas, tmem_map(cfg))

    def tma(self, name: str) -> TmaTile:
        tile = getattr(self.cfg, f"{name}_tile")
        return TmaTile(getattr(self.args, f"{name}_atom"), getattr(self.args, name), tile)


def entry_name(cfg: Config) -> str:
    """What the kernel is called in profiles and reports."""
    table = channels(cfg)
    return kernels.entry_name("fa4_sm100_backward", cfg, table, smem_map(cfg, table))


@cute.kernel
def main_kernel(args: Tensors, cfg: cutlass.Constexpr[Config]):
    kernels.run(Context.of(args, cfg))


@cute.jit
def backward(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    dout: cute.Tensor,
    dq: cute.Tensor,
    dk: cute.Tensor,
    dv: cute.Tensor,
    lse: cute.Tensor,
    dlse: cute.Tensor | None,
    sink: cute.Tensor | None,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    seqused_q: cute.Tensor | None,
    seqused_k: cute.Tensor | None,
    workspace: Workspace,
    scale: Float32,
    scale_log2: Float32,
    scale_over_cap: Float32,
    left: Int32,
    right: Int32,
    max_seqlen_q: Int32,
    max_seqlen_k: Int32,
    batch: Int32,
    cfg: cutlass.Constexpr[Config],
    stream,
):
    """Build the TMA maps and launch the three kernels.

    Args:
        q, k, v, out, dout, dq, dk, dv: (batch, rows, heads, dim), or varlen (rows, heads, dim); last stride 1.
        lse, dlse: (batch, heads, rows), or varlen (heads, rows); float32.
        workspace: for `cfg.row_blocks`; on return its dsink holds the terms of dsink.
    """
    q, k, v, out, dout, dq, dk, dv = (as_matrices(x) for x in (q, k, v, out, dout, dq, dk, dv))
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    heads_q, heads_kv = cute.size(q, mode=[2]), cute.size(k, mode=[2])
    statistics, dq_sum, turns = (None if x is None else _reversed(x) for x in workspace[:3])
    lse, dlse, dsink = (None if x is None else as_columns(x) for x in (lse, dlse, workspace[3]))
    blocks = Order(cute.ceil_div(max_seqlen_q, cfg.tile_m), heads_q, batch)
    rows = RowTensors(out, dout, dq, lse, dlse, sink, dsink, statistics, dq_sum, turns, lengths, blocks, scale)
    launch_statistics(rows, cfg.row_blocks, stream)

    seqlens = cute.size(q, mode=[0]), cute.size(k, mode=[0])
    # Ascending key blocks start a causal problem's longest work first: the first are seen by the most queries.
    order = Order(cute.ceil_div(max_seqlen_k, cfg.span), heads_kv, batch, None, cfg.descending, cfg.ctas)
    loaded, stored = (q, k, v, dout), (dk, dv)
    if cutlass.const_expr(cfg.ragged):
        loaded, stored = tuple(ragged(x) for x in loaded), tuple(ragged(x) for x in stored)
    tiles = (cfg.q_tile, cfg.k_tile, cfg.v_tile, cfg.do_tile, cfg.dk_tile, cfg.dv_tile)
    maps = [TmaTile.load(x, tile, cfg.ctas) for x, tile in zip(loaded, tiles)]
    maps += [TmaTile.store(x, tile) for x, tile in zip(stored, tiles[4:])]
    ends = [end for tma in maps for end in (tma.atom, tma.tensor)]
    args = Tensors(
        *ends, statistics, dq_sum, turns, lengths, *seqlens, order, scale, scale_log2,
        scale_over_cap, left, right,
    )  # fmt: skip
    table = channels(cfg)
    smem = smem_map(cfg, table)
    kernels.set_entry_name(main_kernel, entry_name(cfg))
    main_kernel(args, cfg).launch(
        grid=(order.ctas, 1, 1),
        block=(ROLES.threads, 1, 1),
        cluster=(cfg.ctas, 1, 1),
        smem=smem.nbytes,
        min_blocks_per_mp=1,
        stream=stream,
    )
    launch_finish(rows, cfg.row_blocks, stream)


def _reversed(x: cute.Tensor) -> cute.Tensor:
    """The modes in opposite order: the contiguous one first."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(reversed(range(cute.rank(x))))))
