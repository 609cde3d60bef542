"""Hopper backward kernel for large head dims: roles, channels and shared-memory map.

dV and dK of 64 keys fill the registers of two warpgroups. So a CTA owns 64 keys, and its two consumers divide the work
by product: dV computes S^T = K Q^T and dV += P^T dO; dK computes dP^T = V dO^T and dK += dS^T Q. The left operands of
both accumulators stay in registers. P passes from dV to dK through shared memory, in thread order. dS is stored to
shared memory for dQ = dS K: each consumer computes some columns of dQ and adds them to the float32 sum directly from
registers. The consumers wait for each other only through channels, so one computes P or dS while the other runs
products. In a deterministic run two warps keep the order of the additions; see `semaphores`. The CTAs of a pair (`ctas`
= 2) iterate over the same queries and send each other dS. Each CTA has half of the dQ columns for the keys of both, so
dQ is added to the sum once per 128 keys.
"""

from __future__ import annotations

from ....bwd.launch import BackwardKernel
from ....pipeline import kernel as kernels
from ....pipeline.channels import ONCE, By, Carries, Channel, ChannelTable, ClusterSharing, Implied
from ....pipeline.roles import Role, RoleTable
from ....pipeline.smem import Region, SmemMap
from .config import Sm90WideConfig
from .context import Sm90WideContext
from .dk import dk
from .dv import dv
from .load import load
from .semaphores import acquire, release

WORKERS = (
    Role("dV", warps=(0, 4), regs=240, body=dv),
    Role("dK", warps=(4, 8), regs=240, body=dk),
    Role("load", warps=(8, 9), regs=24, body=load),
)
ROLES = RoleTable(WORKERS)
IN_ORDER = RoleTable(
    (
        *WORKERS,
        Role("acquire", warps=(9, 10), regs=24, body=acquire),
        Role("release", warps=(10, 11), regs=24, body=release),
    )
)


def channels(cfg: Sm90WideConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>; "compute" is both consumers."""
    both, memory = ("dV", "dK"), Carries.ASYNC_SMEM
    sharing = ClusterSharing.MULTICAST if cfg.ctas > 1 else ClusterSharing.NOTHING
    pair_channels: tuple[Channel, ...] = ()
    ds_freed: By | Implied = By.WGMMA
    if cfg.ctas == 2:
        peer_ds = Channel(
            "dK_compute_dSother", "dK", both, By.TMA, By.WGMMA, cfg.ds_stages, memory, 2, ClusterSharing.MULTICAST
        )
        pair_channels = Channel("load_compute_Kother", "load", both, By.TMA, ONCE, 1, memory), peer_ds
        ds_freed = Implied(peer_ds.name, "free")
    order_channels: tuple[Channel, ...] = ()
    if cfg.deterministic:
        # Same stages as dS, one step later.
        order_channel = Channel(
            "acquire_compute_order", "acquire", both, By.WARP, By.WARP, cfg.ds_stages, Carries.SMEM, releaser="release"
        )
        added_channel = Channel(
            "compute_release_dQ", both, "release", By.WARP, Implied(order_channel.name), cfg.ds_stages, Carries.SMEM
        )
        order_channels = order_channel, added_channel
    return ChannelTable(
        (
            Channel("load_compute_K", "load", both, By.TMA, ONCE, 1, memory),
            Channel("load_compute_V", "load", "dK", By.TMA, ONCE, 1, memory),
            Channel("load_compute_Q", "load", both, By.TMA, By.WGMMA, cfg.q_stages, memory, cfg.ctas, sharing),
            Channel("load_compute_dO", "load", both, By.TMA, By.WGMMA, cfg.stages, memory, cfg.ctas, sharing),
            Channel("dV_dK_P", "dV", "dK", By.WARP, By.WARP, cfg.ds_stages, Carries.SMEM),
            Channel("dK_compute_dS", "dK", both, By.WARP, ds_freed, cfg.ds_stages, memory),
            *pair_channels,
            *order_channels,
        ),
        IN_ORDER if cfg.deterministic else ROLES,
    )


def smem_map(cfg: Sm90WideConfig, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("K", cfg.k_tile.nbytes, align=1024),
        Region("Kother", cfg.peer_k_bytes, align=1024),
        Region("V", cfg.v_tile.nbytes, align=1024),
        Region("Q", cfg.q_stages * cfg.q_tile.nbytes, align=1024),
        Region("dO", cfg.stages * cfg.do_tile.nbytes, align=1024),
        Region("dS", cfg.ds_stages * cfg.ds_tile.nbytes, align=1024),
        Region("P", cfg.ds_stages * cfg.p_bytes, align=1024),
        Region("rows", cfg.q_stages * cfg.rows_bytes, align=128),
        Region("semaphores", cfg.order_bytes),
        Region("barriers", table.nbytes, align=8),
    )


def context(args, cfg: Sm90WideConfig, table: ChannelTable, smem: SmemMap) -> Sm90WideContext:
    return Sm90WideContext(args, cfg, table, smem, cluster=cfg.ctas)


KERNEL = BackwardKernel("sm90.backward_wide", channels, smem_map, context, clusters=True, overlap=kernels.Overlap.ROLES)
