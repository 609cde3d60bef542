"""The Hopper forward: the page to read first. Who does what, who hands what to whom, and where things lie.

A CTA owns a tile of query rows, 64 for each warpgroup that computes, and walks the key blocks from last to first. Each
of these teams does all of its rows' work: S = Q K^T, softmax in the registers where S arrives, O += P V with P from
registers. They take turns on the matrix unit, so that the softmax of one meets the products of the others. One warp of
another warpgroup loads, a work tile ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.order import Order
from ...core.sequence import Lengths, as_columns, as_matrices, extent, ragged
from ...pipeline import kernel as kernels
from ...pipeline.channels import By, Carries, Channel, ChannelTable, Every
from ...pipeline.roles import WARPS_PER_WARPGROUP, Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from ...pipeline.tma import TmaTile
from .compute import compute
from .config import COMPUTE_REGS, LOAD_REGS, Config
from .load import load
from .work import grid


def roles(cfg: Config) -> RoleTable:
    end = cfg.teams * WARPS_PER_WARPGROUP
    return RoleTable(
        (
            Role("compute", warps=(0, end), regs=COMPUTE_REGS[cfg.teams], body=compute, teams=cfg.teams),
            Role("load", warps=(end, end + 1), regs=LOAD_REGS[cfg.teams], body=load),
        )
    )


def channels(cfg: Config) -> ChannelTable:
    """<producer>_<consumer>_<payload>; a stage of Q per team and buffer, rings of K and V that all teams read."""
    memory, teams = Carries.ASYNC_SMEM, Every("compute")
    q_freed = By.WARP if cfg.o_over_q else By.WGMMA  # by the stores of the O staged there, or by the products
    rows = (
        Channel("load_compute_Q", "load", "compute", By.TMA, q_freed, cfg.q_buffers * cfg.teams, memory),
        Channel("load_compute_K", "load", teams, By.TMA, By.WGMMA, cfg.stages, memory),
        Channel("load_compute_V", "load", teams, By.TMA, By.WGMMA, cfg.stages, memory),
    )
    return ChannelTable(rows, roles(cfg))


def smem_map(cfg: Config, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("Q", cfg.q_buffers * cfg.teams * cfg.q_step, align=1024),
        Region("K", cfg.stages * cfg.k_tile.nbytes, align=1024),
        Region("V", cfg.stages * cfg.v_tile.nbytes, align=1024),
        Region("O", (cfg.teams - 1) * cfg.o_step + cfg.o_bytes, align=1024, over="Q" if cfg.o_over_q else None),
        Region("barriers", table.nbytes, align=8),
    )


@dataclass(frozen=True)
class Tensors:
    """The kernel's run-time arguments. Rows of a matrix are (query) or, packed, (head in group, query)."""

    q_atom: cute.CopyAtom
    q: cute.Tensor  # TMA coordinates (rows, head_dim, heads, batch), or varlen (rows, head_dim, heads)
    k_atom: cute.CopyAtom
    k: cute.Tensor  # of ragged sequences with one mode more, see core/sequence
    v_atom: cute.CopyAtom
    v: cute.Tensor
    o_atom: cute.CopyAtom
    o: cute.Tensor
    out: cute.Tensor  # plain memory, (rows, head_dim_v, heads, batch), or varlen without the batch
    lse: cute.Tensor  # (rows, 1, heads, batch), or varlen (rows, 1, heads)
    sink: cute.Tensor | None  # (heads_q,), float32
    lengths: Lengths
    order: Order
    seqlen_k: Int32  # of a dense sequence
    scale_log2: Float32  # softmax_scale * log2(e); with a softcap, softcap * log2(e)
    to_natural: Float32  # turns a logit that was scaled by scale_log2 into natural units, undoing its rounding
    scale_over_cap: Float32  # softmax_scale / softcap
    left: Int32
    right: Int32


@dataclass(frozen=True, slots=True)
class Context(kernels.Context):
    """What a role's body gets."""

    @staticmethod
    def of(args: Tensors, cfg: Config) -> Context:
        table = channels(cfg)
        return Context(args, cfg, table, smem_map(cfg, table))

    def tma(self, name: str) -> TmaTile:
        tile = getattr(self.cfg, f"{name}_tile")
        return TmaTile(getattr(self.args, f"{name}_atom"), getattr(self.args, name), tile)


def entry_name(cfg: Config) -> str:
    """What the kernel is called in profiles and reports."""
    table = channels(cfg)
    return kernels.entry_name("fa4_sm90_forward", cfg, table, smem_map(cfg, table))


@cute.kernel
def kernel(args: Tensors, cfg: cutlass.Constexpr[Config]):
    kernels.run(Context.of(args, cfg), overlaps=True)


@cute.jit
def forward(
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    lse: cute.Tensor,
    sink: cute.Tensor | None,
    cu_seqlens_q: cute.Tensor | None,
    cu_seqlens_k: cute.Tensor | None,
    seqused_q: cute.Tensor | None,
    seqused_k: cute.Tensor | None,
    scale_log2: Float32,
    to_natural: Float32,
    scale_over_cap: Float32,
    left: Int32,
    right: Int32,
    max_seqlen_q: Int32,
    batch: Int32,
    section: Int32,
    ctas: Int32,
    cfg: cutlass.Constexpr[Config],
    stream,
):
    """Build the TMA maps and launch.

    Args:
        q, k, v, out: (batch, rows, heads, dim), or varlen (rows, heads, dim); last stride 1.
        lse: (batch, heads, rows), or varlen (heads, rows); float32.
        section: pairs of head and sequence that advance together, longest tiles first.
        ctas: CTAs to launch at most (persistent schedule).
    """
    q, out = (as_matrices(x, cfg.packed) for x in (q, out))
    k, v = (as_matrices(x) for x in (k, v))
    lse, seqlen_k = as_columns(lse, cfg.packed), extent(k)
    if cutlass.const_expr(cfg.ragged_k):
        k, v = ragged(k), ragged(v)
    loaded = ((q, cfg.q_tile), (k, cfg.k_tile), (v, cfg.v_tile))
    tma_q, tma_k, tma_v = (TmaTile.load(x, tile) for x, tile in loaded)
    tma_o = TmaTile.store(ragged(out) if cfg.varlen else out, cfg.o_tile)
    m_blocks = cute.ceil_div(max_seqlen_q * cfg.packed, cfg.rows)
    # The last row blocks of a causal problem see the most keys, so the longest tiles start first.
    order = Order(m_blocks, cute.size(q, mode=[2]), batch, section, descending=True)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    args = Tensors(
        tma_q.atom, tma_q.tensor, tma_k.atom, tma_k.tensor, tma_v.atom, tma_v.tensor, tma_o.atom, tma_o.tensor,
        out, lse, sink, lengths, order, seqlen_k, scale_log2, to_natural, scale_over_cap, left, right,
    )  # fmt: skip
    table = channels(cfg)
    kernels.set_entry_name(kernel, entry_name(cfg))
    kernel(args, cfg).launch(
        grid=(grid(order, cfg.schedule, ctas), 1, 1),
        block=(table.roles.threads, 1, 1),
        smem=smem_map(cfg, table).nbytes,
        min_blocks_per_mp=1,
        use_pdl=True,
        stream=stream,
    )
