"""The Hopper backward: the page to read first. Who does what, who hands what to whom, and where things lie.

A CTA owns a block of 128 keys and walks the query blocks that see it, for each query head of the group in turn, so
that dK and dV grow in registers and are written once. Two warpgroups have 64 keys each. Per step, on transposed scores:
S^T = K Q^T and dP^T = V dO^T; P^T and dS^T stay in registers as left operands of dV += P^T dO and dK += dS^T Q; dS goes
to shared memory too, for dQ = dS K, which leaves through shared memory as an addition to a float32 sum. Two small
kernels go around it: row statistics and cleared sums before, the sums' conversion to dQ after. The main kernel and the
last one are launched while the one before still runs, and wait for it where they need its results.
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
from ...pipeline.channels import ONCE, By, Carries, Channel, ChannelTable, Every, Implied
from ...pipeline.roles import Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from ...pipeline.tma import TmaTile
from .compute import compute
from .config import REDUCERS, SECTION_BYTES, TEAMS, TILE_N, Config
from .load import load
from .reduce import reduce

ROLES = RoleTable(
    (
        Role("compute", warps=(0, 8), regs=240, body=compute, teams=TEAMS),
        Role("load", warps=(8, 9), regs=24, body=load),
        Role("reduce", warps=(9, 12), regs=24, body=reduce, teams=REDUCERS),
    )
)


def channels(cfg: Config) -> ChannelTable:
    """<producer>_<consumer>_<payload>. Both warpgroups of compute take part in every stage but those of dQ, which are
    each warpgroup's own; see `handing`."""
    both, memory = Every("compute"), Carries.ASYNC_SMEM
    dq_stages = cfg.reducers * TEAMS
    # A warp has seen the dQ of two steps ago, which read this stage, before it says that the last step's dS is full.
    last_ds = Implied("compute_compute_dS")
    return ChannelTable(
        (
            Channel("load_compute_K", "load", both, By.TMA, ONCE, 1, memory),
            Channel("load_compute_V", "load", both, By.TMA, ONCE, 1, memory),
            # Q comes with its rows' statistics, which have been read when the products that follow are done.
            Channel("load_compute_Q", "load", both, By.TMA, By.WGMMA, cfg.stages, memory),
            Channel("load_compute_dO", "load", both, By.TMA, By.WGMMA, cfg.stages, memory),
            Channel("compute_compute_dS", both, both, By.WARP, last_ds, cfg.stages, memory),
            Channel("compute_reduce_dQ", "compute", "reduce", By.WARP, By.READ, dq_stages, memory),
        ),
        ROLES,
    )


def smem_map(cfg: Config, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("K", cfg.k_tile.nbytes, align=1024),
        Region("V", cfg.v_tile.nbytes, align=1024),
        Region("Q", cfg.stages * cfg.q_tile.nbytes, align=1024),
        Region("dO", cfg.stages * cfg.do_tile.nbytes, align=1024),
        Region("dS", cfg.stages * cfg.ds_tile.nbytes, align=1024),
        Region("dQ", TEAMS * cfg.dq_bytes, align=128),
        Region("rows", cfg.stages * cfg.rows_bytes, align=128),
        Region("barriers", table.nbytes, align=8),
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
    dq_sum: cute.Tensor  # (elements, blocks, heads_q): a block's dQ; see `placement`
    turns: cute.Tensor | None  # (blocks, heads_q): how many key blocks have added to dQ
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

    first_reduce_warp: int = ROLES["reduce"].warps[0]
    last_dq: int = 1  # named barriers; 0 is the CTA's
    gradients_staged: int = 2  # and 3: one for each warpgroup of compute

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
    return kernels.entry_name("fa4_sm90_backward", cfg, table, smem_map(cfg, table))


@cute.kernel
def main_kernel(args: Tensors, cfg: cutlass.Constexpr[Config]):
    cute.arch.griddepcontrol_launch_dependents()
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
    statistics = rows_by_thread(statistics, cfg.tile_m)
    lse, dlse, dsink = (None if x is None else as_columns(x) for x in (lse, dlse, workspace[3]))
    blocks = Order(cute.ceil_div(max_seqlen_q, cfg.tile_m), heads_q, batch)
    rows = RowTensors(out, dout, dq, lse, dlse, sink, dsink, statistics, dq_sum, turns, lengths, blocks, scale)
    launch_statistics(rows, cfg.row_blocks, stream)

    seqlens = cute.size(q, mode=[0]), cute.size(k, mode=[0])
    n_blocks = cute.ceil_div(max_seqlen_k, TILE_N)
    section = pairs_together(n_blocks, max_seqlen_q, cfg)
    order = Order(n_blocks, heads_kv, batch, cutlass.min(section, heads_kv * batch), cfg.descending)
    loaded, stored = (q, k, v, dout), (dk, dv)
    if cutlass.const_expr(cfg.ragged):
        loaded, stored = tuple(ragged(x) for x in loaded), tuple(ragged(x) for x in stored)
    tiles = (cfg.q_tile, cfg.k_tile, cfg.v_tile, cfg.do_tile, cfg.dk_tile, cfg.dv_tile)
    maps = [TmaTile.load(x, tile) for x, tile in zip(loaded, tiles)]
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
        smem=smem.nbytes,
        min_blocks_per_mp=1,
        stream=stream,
        use_pdl=True,
    )
    launch_finish(rows, cfg.row_blocks, stream)


def pairs_together(n_blocks: Int32, seqlen_q: Int32, cfg: Config) -> Int32:
    """How many pairs of head and sequence advance together: as many as the L2 cache serves.

    Ascending key blocks start a causal problem's longest work first; at least so many pairs then advance together that
    the longest work of the last ones begins early enough. A shifted order wants a pair's CTAs to run at the same time.
    """
    if cfg.shifted:
        return Int32(1)
    fit = SECTION_BYTES // cfg.query_bytes // cfg.group // cutlass.max(seqlen_q, 1)
    balanced = 2 * cfg.sms // n_blocks + 1 if cfg.has_right and not cfg.deterministic else 1
    return Int32(cutlass.max(fit, balanced))


def rows_by_thread(statistics: cute.Tensor, tile_m: int) -> cute.Tensor:
    """(tile_m, 2, blocks, heads) whose memory has, of every 16 queries, the four that one thread of `compute` needs
    side by side: 2 j, 2 j + 1, 2 j + 8 and 2 j + 9."""
    shape, stride = statistics.shape, statistics.stride
    layout = cute.make_layout(((2, 4, 2, tile_m // 16), *shape[1:]), stride=((1, 4, 2, 16), *stride[1:]))
    return cute.make_tensor(statistics.iterator, layout)


def _reversed(x: cute.Tensor) -> cute.Tensor:
    """The modes in opposite order: the contiguous one first."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(reversed(range(cute.rank(x))))))
