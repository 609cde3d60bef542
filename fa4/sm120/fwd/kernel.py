"""Consumer Blackwell's forward kernel: roles, channels and shared-memory map. Read this file first.

A CTA owns a tile of query rows, 64 per consumer, and iterates over the key blocks from last to first. A consumer is
four warps with 16 rows each, which depend on each other only where they store O over Q. Each warp does all work of its
rows: S = Q K^T, softmax in registers, O += P V with P from registers. mma.sync returns when its product is done, so a
warp overlaps nothing with its own products: another consumer's warp on the same scheduler does. One producer warp loads
one work tile ahead.
"""

from __future__ import annotations

from ...fwd.consumers import consumer_roles
from ...fwd.launch import ForwardKernel
from ...fwd.variant import OutStore
from ...pipeline.channels import By, Carries, Channel, ChannelTable, Every
from ...pipeline.roles import RoleTable
from ...pipeline.smem import Region, SmemMap
from .compute import compute
from .config import Sm120ForwardConfig
from .context import Sm120ForwardContext
from .load import load


def roles(cfg: Sm120ForwardConfig) -> RoleTable:
    return consumer_roles(cfg, compute, load)


def channels(cfg: Sm120ForwardConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>. Each consumer has its Q; all read the same K and V rings. Q is
    free when it is in registers, or when O, staged over it, has been read."""
    memory = Carries.ASYNC_SMEM
    queries = Channel("load_compute_Q", "load", "compute", By.TMA, By.WARP, cfg.consumers, memory)
    rings = (
        Channel(f"load_compute_{x}", "load", Every("compute"), By.TMA, By.WARP, cfg.stages, memory) for x in ("K", "V")
    )
    return ChannelTable((queries, *rings), roles(cfg))


def smem_map(cfg: Sm120ForwardConfig, table: ChannelTable) -> SmemMap:
    out = Region("O", cfg.consumers * cfg.q_step, align=1024, over="Q")
    return SmemMap(
        Region("Q", cfg.consumers * cfg.q_step, align=1024),
        Region("K", cfg.stages * cfg.k_tile.nbytes, align=1024),
        Region("V", cfg.stages * cfg.v_tile.nbytes, align=1024),
        *(Region(f"{x} scales", cfg.stages * n) for x, n in zip("KV", cfg.scale_bytes) if n),
        *(() if cfg.out_store is OutStore.DIRECT else (out,)),
        Region("barriers", table.nbytes, align=8),
    )


KERNEL = ForwardKernel("sm120.forward", channels, smem_map, Sm120ForwardContext)
