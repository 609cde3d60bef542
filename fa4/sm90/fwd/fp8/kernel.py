"""Hopper forward of e4m3 queries, keys and values: roles, channels and shared-memory map. Read this file first.

As `sm90.fwd`, with three differences. V comes transposed from a kernel before this one: the tensor cores read 8-bit
operands only along the reduction, here the keys. They also add with few bits, so O is added up elsewhere, see `sums`.
And consumers, three of them to head dim 128, alternate in the exponentials: beside products that take half of the time,
these are what bounds.
"""

from __future__ import annotations

from ....fwd.consumers import consumer_roles
from ....fwd.launch import ForwardKernel, ForwardKernelArguments
from ....pipeline.channels import By, Carries, Channel, ChannelTable, Every
from ....pipeline.roles import WARPS_PER_WARPGROUP, RoleTable
from ....pipeline.smem import Region, SmemMap
from .compute import compute
from .config import Fp8Config
from .context import Fp8Context
from .load import load


def roles(cfg: Fp8Config) -> RoleTable:
    return consumer_roles(cfg, compute, load)


def channels(cfg: Fp8Config) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>. Q has `q_buffers` stages per consumer. All consumers read the
    same K and V rings."""
    memory = Carries.ASYNC_SMEM
    rings = [
        Channel(f"load_compute_{x}", "load", Every("compute"), By.TMA, By.WGMMA, cfg.stages, memory) for x in ("K", "V")
    ]
    queries = Channel("load_compute_Q", "load", "compute", By.TMA, By.WGMMA, cfg.q_buffers * cfg.consumers, memory)
    return ChannelTable((queries, *rings), roles(cfg))


def smem_map(cfg: Fp8Config, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("Q", cfg.q_buffers * cfg.consumers * cfg.q_step, align=1024),
        Region("K", cfg.stages * cfg.k_tile.nbytes, align=1024),
        Region("V", cfg.stages * cfg.v_tile.nbytes, align=1024),
        Region("sums of O", cfg.consumers * WARPS_PER_WARPGROUP * cfg.bytes_of_sums, align=1024),
        Region("barriers", table.nbytes, align=8),
    )


def context(args: ForwardKernelArguments, cfg: Fp8Config, table: ChannelTable, smem: SmemMap) -> Fp8Context:
    return Fp8Context(args, cfg, table, smem)


KERNEL = ForwardKernel("sm90.fp8", channels, smem_map, context)
