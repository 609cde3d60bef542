"""The Hopper backward of the largest head dims: who does what, who hands what to whom, and where things lie.

dV and dK of 64 keys fill the registers of two warpgroups. So a CTA owns 64 keys, and its warpgroups divide the work by
products: one has S^T = K Q^T and dV += P^T dO, the other dP^T = V dO^T and dK += dS^T Q. The left operands of both sums
stay in registers; P is handed over through shared memory, in the order in which threads hold it, and dS goes there for
dQ = dS K, of which each warpgroup has some columns and adds them to the float32 sum straight from its registers.
The warpgroups wait for each other only through the channels, so one computes weights while the other multiplies.
In a deterministic run two warps keep the order of those additions; see `semaphores`.
CTAs of a pair (`ctas` = 2) walk through the same queries and send each other dS, so that each has half of dQ's columns
for the keys of both, and dQ is added to the sum once for 128 keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....bwd.launch import BackwardKernel
from ....pipeline import kernel as kernels
from ....pipeline.channels import ONCE, Across, By, Carries, Channel, ChannelTable, Implied
from ....pipeline.roles import Role, RoleTable
from ....pipeline.smem import Region, SmemMap
from ..load import load
from .config import WideConfig
from .dk import dk
from .dv import dv
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


def channels(cfg: WideConfig) -> ChannelTable:
    """<producer>_<consumer>_<payload>; "compute" are both warpgroups."""
    both, memory = ("dV", "dK"), Carries.ASYNC_SMEM
    across = Across.MULTICAST if cfg.multicast > 1 else Across.NOTHING
    of_pair: tuple[Channel, ...] = ()
    ds_freed: By | Implied = By.WGMMA
    if cfg.ctas == 2:
        other = Channel(
            "dK_compute_dSother", "dK", both, By.TMA, By.WGMMA, cfg.ds_stages, memory, cfg.ctas, Across.MULTICAST
        )
        of_pair = Channel("load_compute_Kother", "load", both, By.TMA, ONCE, 1, memory), other
        ds_freed = Implied(other.name, "free")
    order_channels: tuple[Channel, ...] = ()
    if cfg.deterministic:
        # In step with dS, one step late.
        order_index = Channel(
            "acquire_compute_order", "acquire", both, By.WARP, By.WARP, cfg.ds_stages, Carries.SMEM, freer="release"
        )
        added = Channel(
            "compute_release_dQ", both, "release", By.WARP, Implied(order_index.name), cfg.ds_stages, Carries.SMEM
        )
        order_channels = order_index, added
    return ChannelTable(
        (
            Channel("load_compute_K", "load", both, By.TMA, ONCE, 1, memory),
            Channel("load_compute_V", "load", "dK", By.TMA, ONCE, 1, memory),
            Channel("load_compute_Q", "load", both, By.TMA, By.WGMMA, cfg.q_stages, memory, cfg.multicast, across),
            Channel("load_compute_dO", "load", both, By.TMA, By.WGMMA, cfg.stages, memory, cfg.multicast, across),
            Channel("dV_dK_P", "dV", "dK", By.WARP, By.WARP, cfg.ds_stages, Carries.SMEM),
            Channel("dK_compute_dS", "dK", both, By.WARP, ds_freed, cfg.ds_stages, memory),
            *of_pair,
            *order_channels,
        ),
        IN_ORDER if cfg.deterministic else ROLES,
    )


def smem_map(cfg: WideConfig, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("K", cfg.k_tile.nbytes, align=1024),
        Region("Kother", cfg.others_k_bytes, align=1024),
        Region("V", cfg.v_tile.nbytes, align=1024),
        Region("Q", cfg.q_stages * cfg.q_tile.nbytes, align=1024),
        Region("dO", cfg.stages * cfg.do_tile.nbytes, align=1024),
        Region("dS", cfg.ds_stages * cfg.ds_tile.nbytes, align=1024),
        Region("P", cfg.ds_stages * cfg.p_bytes, align=1024),
        Region("rows", cfg.q_stages * cfg.rows_bytes, align=128),
        Region("semaphores", cfg.order_bytes),
        Region("barriers", table.nbytes, align=8),
    )


@dataclass(frozen=True, slots=True)
class Context(kernels.Context):
    """What a role's body gets."""

    last_dq: int = 1  # named barriers; 0 is the CTA's
    gradients_staged: int = 2  # and 3: one for each warpgroup
    ds_written: int = 4


def context(args, cfg: WideConfig, table: ChannelTable, smem: SmemMap) -> Context:
    return Context(args, cfg, table, smem, cluster=cfg.ctas)


KERNEL = BackwardKernel("sm90.backward_wide", channels, smem_map, context, clusters=True, overlap=kernels.Overlap.ROLES)
