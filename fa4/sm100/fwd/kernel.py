"""The Blackwell forward: the page to read first. Who does what, who hands what to whom, and where things lie.

A CTA owns two Q tiles of 128 rows and walks the key blocks from last to first. While one tile's S is in softmax the
other tile's products run: per key block and Q tile, S = Q K^T goes to tensor memory, a softmax warpgroup (one thread
a row) reads it and writes P = exp2(S - max) over it in 16 bits, O += P V accumulates in tensor memory. When a row's
maximum has grown, the correction warpgroup scales O before the next product; at the end it normalises O.

Two CTAs may work as a pair (`cfg.ctas`, see `config`): their Q tiles side by side, one of them issuing for both.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...core.order import Order
from ...core.sequence import Lengths, as_columns, as_matrices, ragged
from ...pipeline import kernel as kernels
from ...pipeline.channels import (
    Across,
    By,
    Carries,
    Channel,
    ChannelTable,
    Every,
    Implied,
)
from ...pipeline.roles import Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from ...pipeline.tma import TmaTile
from .. import tmem
from ..signals import SIGNALS
from .config import Config, Schedule
from .correction import correction
from .epilogue import epilogue
from .load import load
from .mma import mma
from .schedule import schedule
from .softmax import softmax
from .work import grid


def roles(cfg: Config) -> RoleTable:
    """A softmax warpgroup for each Q tile, and two warpgroups for the rest."""
    first = 4 * cfg.q_tiles
    return RoleTable(
        (
            Role("softmax", warps=(0, first), regs=192, body=softmax, teams=cfg.q_tiles),
            Role("correction", warps=(first, first + 4), regs=72, body=correction),
            Role("mma", warps=(first + 4, first + 5), regs=56, body=mma),
            Role("load", warps=(first + 5, first + 6), regs=56, body=load),
            Role("epilogue", warps=(first + 6, first + 7), regs=56, body=epilogue),
            Role("schedule", warps=(first + 7, first + 8), regs=56, body=schedule),
        )
    )


def tmem_map(cfg: Config) -> tmem.TmemMap:
    """One S and one O per Q tile; P lies over the second half of each S."""
    s_columns, half = cfg.q_tiles * cfg.tile_n, cfg.tile_n // 2
    return tmem.TmemMap(
        S=tmem.cols(0, s_columns),
        P=tmem.alias_of("S", columns=s_columns - half, offset=half),
        O=tmem.cols(s_columns, cfg.q_tiles * cfg.o_columns),
    )


NEXT_S = Implied("mma_softmax_S")
FREE_S = Implied("mma_softmax_S", "free")


def channels(cfg: Config) -> ChannelTable:
    """<producer>_<consumer>_<payload>; a stage per Q tile, except K/V's ring. What mma takes part in, a pair shares."""
    across = Across.PAIR if cfg.ctas == 2 else Across.NOTHING

    def shared(name, producer, consumer, filled, freed, stages, carries) -> Channel:
        return Channel(name, producer, consumer, filled, freed, stages, carries, cfg.ctas, across)

    if cfg.o_over_q:  # a Q tile's place is free when the O staged there has been stored
        q = Channel("load_mma_Q", "load", "mma", By.TMA, By.WARP, cfg.q_tiles, Carries.ASYNC_SMEM, freer="epilogue")
    else:
        q = shared("load_mma_Q", "load", "mma", By.TMA, By.UMMA, cfg.q_tiles, Carries.ASYNC_SMEM)
    rows = (
        q,
        shared("load_mma_KV", "load", "mma", By.TMA, By.UMMA, cfg.kv_stages, Carries.ASYNC_SMEM),
        # Free again = P's head is written over S, and O is ready to be added to. The next S needs no wait of
        # its own: the matrix unit works in order, and the product before it waited for this.
        shared("mma_softmax_S", "mma", ("softmax", "correction"), By.UMMA, By.WARP, cfg.q_tiles, Carries.TMEM),
        # The next S comes after the product that reads P, and after correction has read the factor.
        shared("softmax_mma_Ptail", "softmax", "mma", By.WARP, NEXT_S, cfg.q_tiles, Carries.TMEM),
        Channel("softmax_correction_scale", "softmax", "correction", By.WARP, NEXT_S, cfg.q_tiles, Carries.SMEM),
        Channel("softmax_correction_norm", "softmax", "correction", By.WARP, By.WARP, cfg.q_tiles, Carries.SMEM),
        # Correction has read O when it frees the next work tile's first S.
        shared("mma_correction_O", "mma", "correction", By.UMMA, FREE_S, cfg.q_tiles, Carries.TMEM),
        Channel("correction_epilogue_O", "correction", "epilogue", By.WARP, By.READ, cfg.q_tiles, Carries.ASYNC_SMEM),
    )
    if cfg.schedule is Schedule.DYNAMIC:
        readers = (Every("softmax"), "correction", "mma", "load", "epilogue", "schedule")
        rows += (Channel("schedule_all_index", "schedule", readers, By.TMA, By.WARP, 1, Carries.ASYNC_SMEM),)
    return ChannelTable(rows, roles(cfg), SIGNALS)


def smem_map(cfg: Config, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("Q", cfg.q_tiles * cfg.q_tile.nbytes, align=1024),
        Region("KV", cfg.kv_stages * cfg.kv_stage_bytes, align=1024),
        Region("O", (cfg.q_tiles - 1) * cfg.o_step + cfg.o_tile.nbytes, align=1024, over="Q" if cfg.o_over_q else None),
        Region("scale", cfg.rows_bytes),
        Region("norm", cfg.rows_bytes),
        Region("barriers", table.nbytes, align=8),
        Region("tmem", 4),
        Region("index", 16),
    )


@dataclass(frozen=True)
class Tensors:
    """The kernel's run-time arguments. Rows of a matrix are (query) or, packed, (head in group, query)."""

    q_atom: cute.CopyAtom
    q: cute.Tensor  # TMA coordinates (rows, head_dim, heads, batch), varlen without the batch, perhaps `ragged`
    k_atom: cute.CopyAtom
    k: cute.Tensor
    v_atom: cute.CopyAtom
    v: cute.Tensor
    o_atom: cute.CopyAtom
    o: cute.Tensor
    out: cute.Tensor  # plain memory, same modes
    lse: cute.Tensor  # (rows, heads, batch), or varlen (rows, heads)
    sink: cute.Tensor | None  # (heads_q,), float32
    lengths: Lengths
    order: Order
    scale_log2: Float32  # softmax_scale * log2(e); with a softcap, softcap * log2(e)
    to_natural: Float32  # turns a logit that was scaled by scale_log2 into natural units, undoing its rounding
    scale_over_cap: Float32  # softmax_scale / softcap
    left: Int32
    right: Int32


@dataclass(frozen=True, slots=True)
class Context(kernels.Context):
    """What a role's body gets."""

    tmem: tmem.TmemMap | None = None

    @staticmethod
    def of(args: Tensors, cfg: Config) -> Context:
        table = channels(cfg)
        memory = tmem.TensorMemory(table.roles["correction"].warps[0], cfg.ctas)  # any warp would do
        return Context(args, cfg, table, smem_map(cfg, table), memory, cfg.ctas, tmem_map(cfg))

    def tma(self, name: str) -> TmaTile:
        tile = getattr(self.cfg, f"{name}_tile")
        return TmaTile(getattr(self.args, f"{name}_atom"), getattr(self.args, name), tile)


def entry_name(cfg: Config) -> str:
    """What the kernel is called in profiles and reports."""
    table = channels(cfg)
    return kernels.entry_name("fa4_sm100_forward", cfg, table, smem_map(cfg, table))


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
        section: heads whose tiles are worked on together, so that their K and V stay in L2.
        ctas: CTAs to launch at most (persistent schedule).
    """
    q, out = (as_matrices(x, cfg.packed) for x in (q, out))
    k, v = (as_matrices(x) for x in (k, v))
    lse = as_columns(lse, cfg.packed)
    q_map, o_map = (ragged(x) if cfg.ragged_q else x for x in (q, out))
    k_map, v_map = (ragged(x) if cfg.ragged_k else x for x in (k, v))
    loaded = ((q_map, cfg.q_tile), (k_map, cfg.k_tile), (v_map, cfg.v_tile))
    tma_q, tma_k, tma_v = (TmaTile.load(x, tile, cfg.ctas) for x, tile in loaded)
    tma_o = TmaTile.store(o_map, cfg.o_tile)
    m_blocks = cute.ceil_div(max_seqlen_q * cfg.packed, cfg.rows)
    # The last row blocks of a causal problem see the most keys, so the longest tiles start first.
    order = Order(m_blocks, cute.size(q, mode=[2]), batch, section, descending=True, cluster=cfg.ctas)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    args = Tensors(
        tma_q.atom, tma_q.tensor, tma_k.atom, tma_k.tensor, tma_v.atom, tma_v.tensor, tma_o.atom, tma_o.tensor,
        out, lse, sink, lengths, order, scale_log2, to_natural, scale_over_cap, left, right,
    )  # fmt: skip
    table = channels(cfg)
    kernels.set_entry_name(kernel, entry_name(cfg))
    kernel(args, cfg).launch(
        grid=(grid(order, cfg.schedule, ctas), 1, 1),
        block=(table.roles.threads, 1, 1),
        cluster=(cfg.ctas, 1, 1),
        smem=smem_map(cfg, table).nbytes,
        min_blocks_per_mp=1,
        use_pdl=True,
        stream=stream,
    )
