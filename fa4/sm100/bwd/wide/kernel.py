"""The Blackwell backward of head dims above 128: roles, channels and memory of its three kernels. Read `config` first.

A CTA loops over the blocks of the other side that see its rows. Per step: S and dP, in 128 lanes, from both operands in
shared memory; P (for dV) or dS (for dK and dQ) overwrites S or dP in 16 bits and is the left operand of the gradient D,
which accumulates in tensor memory and is written once. Nothing is added across CTAs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import cutlass.cute as cute

from ....bwd.launch import BackwardKernel, BackwardKernelArguments, kernel_arguments, key_block_order, tma_maps
from ....bwd.program import BackwardArguments
from ....core.order import Order, PackedOrder, tile_order
from ....pipeline import kernel as kernels
from ....pipeline.channels import ONCE, By, Carries, Channel, ChannelTable, ClusterSharing, Implied
from ....pipeline.roles import Role, RoleTable
from ....pipeline.smem import Region, SmemMap
from ....pipeline.tma import TmaMap
from ....runtime import jit
from ....runtime.device import Chip
from ... import tmem
from ...signals import SIGNALS
from ..config import ROW_STAGES
from .compute import compute
from .config import Gradient, Sm100WideConfig
from .context import Sm100WideContext
from .load import load
from .mma import mma


def role_table(mma: Callable, load: Callable) -> RoleTable:
    """Return the roles: `compute`, and these bodies of the roles mma and load."""
    return RoleTable(
        (
            Role("compute", warps=(0, 8), regs=208, body=compute),
            Role("mma", warps=(8, 9), regs=80, body=mma),
            Role("load", warps=(9, 10), regs=80, body=load),
        )
    )


ROLES = role_table(mma, load)


def tmem_map(cfg: Sm100WideConfig) -> tmem.TmemMap:
    """TMEM map. dV has two stages of S, which P aliases; dS aliases dP, in two packed halves, one at each end."""
    ranges = dict(S=tmem.cols(0, cfg.stages * cfg.tile_m))
    if cfg.gradient.needs_dp:
        ranges.update(dP=tmem.cols(cfg.tile_m, cfg.tile_m), dS=tmem.alias_of("dP", columns=cfg.tile_m))
    else:
        ranges.update(P=tmem.alias_of("S", columns=2 * cfg.tile_m))
    return tmem.TmemMap(**ranges, D=tmem.cols(2 * cfg.tile_m, cfg.grad_columns))


def channels(cfg: Sm100WideConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>. A pair shares all but the row statistics."""
    sharing = ClusterSharing.PAIR if cfg.ctas == 2 else ClusterSharing.NOTHING

    def channel(name, producer, consumer, filled, freed, stages, carries) -> Channel:
        return Channel(name, producer, consumer, filled, freed, stages, carries, cfg.ctas, sharing)

    smem, scores_free = Carries.ASYNC_SMEM, By.WARP
    # Implied: P has been read when S is full again, dS when dP is, because the matrix unit works in order.
    weights_read = Implied("mma_compute_dP" if cfg.gradient.needs_dp else "mma_compute_S")
    dp: tuple[Channel, ...] = ()
    if cfg.gradient.needs_dp:
        dp = (
            channel("load_mma_leftdP", "load", "mma", By.TMA, ONCE, 1, smem),
            channel("load_mma_rightdP", "load", "mma", By.TMA, By.UMMA, 1, smem),
            channel("mma_compute_dP", "mma", "compute", By.UMMA, Implied("compute_mma_weights"), 1, Carries.TMEM),
        )
    rows: tuple[Channel, ...] = ()
    if cfg.gradient.owns_keys:
        rows = (Channel("load_compute_rows", "load", "compute", By.TMA, By.WARP, ROW_STAGES, Carries.SMEM),)
    return ChannelTable(
        (
            channel("load_mma_leftS", "load", "mma", By.TMA, ONCE, 1, smem),
            channel("load_mma_rightS", "load", "mma", By.TMA, By.UMMA, cfg.stages, smem),
            channel("load_mma_rightD", "load", "mma", By.TMA, By.UMMA, cfg.stages, smem),
            *dp,
            *rows,
            channel(
                "mma_compute_S", "mma", "compute", By.UMMA,
                scores_free if cfg.gradient.needs_dp else Implied("compute_mma_weights"), cfg.stages, Carries.TMEM,
            ),
            channel("compute_mma_weights", "compute", "mma", By.WARP, weights_read, cfg.stages, Carries.TMEM),
            channel("mma_compute_D", "mma", "compute", By.UMMA, ONCE, 1, Carries.TMEM),
        ),
        ROLES,
        SIGNALS,
    )  # fmt: skip


def smem_map(cfg: Sm100WideConfig, table: ChannelTable) -> SmemMap:
    (left, left_dp), (right, right_dp), _ = cfg.gradient.value
    dp: tuple[Region, ...] = ()
    if cfg.gradient.needs_dp:
        dp = (
            Region("leftdP", cfg.tile(left_dp).nbytes, align=1024),
            Region("rightdP", cfg.tile(right_dp).nbytes, align=1024),
        )
    rows = (Region("rows", ROW_STAGES * cfg.rows_bytes, align=128),) if cfg.gradient.owns_keys else ()
    return SmemMap(
        Region("leftS", max(cfg.tile(left).nbytes, cfg.grad_tile.nbytes), align=1024),
        Region("rightS", cfg.stages * cfg.tile(right).nbytes, align=1024),
        Region("rightD", cfg.stages * cfg.columns_tile.nbytes, align=1024),
        *dp,
        *rows,
        Region("barriers", table.nbytes, align=8),
        Region("tmem", 4),
    )


def context(
    args: BackwardKernelArguments, cfg: Sm100WideConfig, table: ChannelTable, smem: SmemMap
) -> Sm100WideContext:
    memory = tmem.TensorMemory(ROLES["mma"].warps[0], cfg.ctas)
    return Sm100WideContext(args, cfg, table, smem, memory, cfg.ctas, tmem_map(cfg))


class WideMaps(NamedTuple):
    """TMA maps of one kernel: its operands, and the gradient that it stores."""

    q: TmaMap
    k: TmaMap
    v: TmaMap
    do: TmaMap
    grad: TmaMap


Wide = TypeVar("Wide", bound=Sm100WideConfig)


@dataclass(frozen=True, slots=True, repr=False)
class WideBackward(BackwardKernel[Wide]):
    """The three kernels as one program."""

    def launcher(self, cfg: Wide, chip: Chip) -> jit.Launcher:
        if chip.emulated:
            for part in parts(cfg):
                self.entry_name(part)  # for reports, as `RoleKernel.launcher` does
        return BackwardKernel.launcher(self, cfg, chip)

    def begin(self, call: BackwardArguments, cfg: Wide, stream: Any) -> None:
        """Start the kernels of dV, dK and dQ."""
        stored = {Gradient.DV: call.dv, Gradient.DK: call.dk, Gradient.DQ: call.rows.dq}
        for part in parts(cfg):
            order = key_block_order(call, part) if part.gradient.owns_keys else query_block_order(call, part)
            tiles = (part.q_tile, part.k_tile, part.v_tile, part.do_tile, part.grad_tile)
            loaded = (call.q, call.k, call.v, call.rows.dout)
            maps = WideMaps(*tma_maps(part, loaded, (stored[part.gradient],), tiles))
            self.start(kernel_arguments(call, maps, order), part, order.ctas, stream)


def parts(cfg: Wide) -> list[Wide]:
    """Configurations of the three kernels."""
    return [replace(cfg, gradient=gradient) for gradient in Gradient]


def query_block_order(call: BackwardArguments, cfg: Sm100WideConfig) -> Order | PackedOrder:
    """Return the launch order of query blocks."""
    sizes, lengths = call.sizes, call.rows.lengths
    return tile_order(
        cfg.cluster_rows, 1, sizes.max_seqlen_q, cute.size(call.q, mode=[0]), lengths.cu_seqlens_q,
        cute.size(call.q, mode=[2]), sizes.batch, descending=cfg.descending, cluster=cfg.ctas,
    )  # fmt: skip


KERNEL = WideBackward("sm100.wide", channels, smem_map, context, clusters=True, overlap=kernels.Overlap.NOTHING)
