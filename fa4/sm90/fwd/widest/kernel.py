"""Hopper forward of head dims above 256: roles, channels and shared-memory map. Read this file first.

O of 128 rows and 512 columns fills the registers of two CTAs: each has half of the columns. They divide S by keys: of
every two key blocks, each computes S and P of one, for all rows and from all columns of Q and K, and sends P to the
other. So shared memory holds Q once per CTA, and a block is loaded once: K by one CTA, V half by half. Row maxima are
exchanged before P is computed, so both CTAs have the same.

A consumer has 64 rows. While the tensor cores compute the first half of the next S, it computes P of this one; the
second half, and O += P V for its own keys and then the peer's, hide the way of P and of the maxima to the peer.

K and V come in parts through one ring, in the order of the products. Both consumers read each part.
"""

from __future__ import annotations

from ....fwd.launch import ForwardKernel, ForwardKernelArguments
from ....pipeline.channels import ONCE, By, Carries, Channel, ChannelTable, ClusterSharing, Every, Implied
from ....pipeline.roles import WARPS_PER_WARPGROUP, Role, RoleTable
from ....pipeline.smem import Region, SmemMap
from .compute import compute
from .config import CONSUMERS, STAGES_OF_MAXIMA, Sm90WidestConfig
from .context import WidestContext
from .load import load

_END = CONSUMERS * WARPS_PER_WARPGROUP
ROLES = RoleTable(
    (
        Role("compute", warps=(0, _END), regs=240, body=compute, instances=CONSUMERS),
        Role("load", warps=(_END, _END + 1), regs=24, body=load),
    )
)


def channels(cfg: Sm90WidestConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>; "peer" is the same consumer in the other CTA. When it releases
    P, it has read the maxima that P was computed with; the next ones are in the other stage."""
    memory, shared = Carries.ASYNC_SMEM, (cfg.ctas, ClusterSharing.MULTICAST)
    compute = "compute"
    weights = Channel("compute_peer_P", compute, compute, By.TMA, By.WGMMA, CONSUMERS, memory, *shared)
    freed = Implied(weights.name, "free")
    maxima = Channel(
        "compute_peer_maxima", compute, compute, By.TMA, freed, STAGES_OF_MAXIMA * CONSUMERS, Carries.SMEM, *shared
    )
    return ChannelTable(
        (
            Channel("load_compute_Q", "load", compute, By.TMA, ONCE, CONSUMERS, memory),
            Channel("load_compute_KV", "load", Every(compute), By.TMA, By.WGMMA, cfg.stages, memory),
            weights,
            maxima,
        ),
        ROLES,
    )


def smem_map(cfg: Sm90WidestConfig, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("Q", CONSUMERS * cfg.q_tile.nbytes, align=1024),
        Region("KV", cfg.stages * cfg.stage_bytes, align=1024),
        Region("P", CONSUMERS * cfg.p_tile.nbytes, align=1024),
        Region("P of peer", CONSUMERS * cfg.p_tile.nbytes, align=1024),
        Region("maxima", cfg.maxima_bytes),
        Region("barriers", table.nbytes, align=8),
    )


def context(args: ForwardKernelArguments, cfg: Sm90WidestConfig, table: ChannelTable, smem: SmemMap) -> WidestContext:
    return WidestContext(args, cfg, table, smem, cluster=cfg.ctas)


KERNEL = ForwardKernel("sm90.widest", channels, smem_map, context)
