"""Latent forward: roles, channels and shared-memory map. Read this file first.

Decoding of latent attention has few query rows, all heads of which share one key/value head of up to 576 columns; V is
the first 512 of them. So a block is loaded once, as K and as V. O of 64 rows fills the registers of two warpgroups,
half of the columns each. They alternate over the key blocks: the even blocks' scores and softmax are one warpgroup's,
the odd ones' the other's. Each multiplies all P with its half of V. P and the rows' maxima go through shared memory.

A block comes in parts, each free as soon as its last reader is done: the columns of V of either warpgroup, and a tail
that is only K's. Shared memory holds a block of each warpgroup, so a part is loaded while others are read. P of a block
takes the place of the block's tail. 8-bit rows become 16-bit blocks on the way into shared memory. Rows of pages that
TMA cannot load, as those that a query lists, are copied one by one; a CTA then takes several work tiles.
"""

from __future__ import annotations

from ...fwd.launch import ForwardKernel, ForwardKernelArguments
from ...fwd.variant import KvLoad
from ...pipeline.channels import ONCE, By, Carries, Channel, ChannelTable, Implied
from ...pipeline.roles import WARPS_PER_WARPGROUP, Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from ..wgmma import ROWS
from .compute import even, odd
from .config import GATHERERS, HALVES, STAGES, LatentConfig
from .context import LatentContext
from .convert import convert
from .gather import gather
from .load import load

_FILLED = {KvLoad.TMA: By.TMA, KvLoad.GATHER: By.COPIES, KvLoad.FETCH: By.WARP}


def roles(cfg: LatentConfig) -> RoleTable:
    """The load role is a warp; for 8-bit rows, a warpgroup that converts them; for single rows, two warps for each
    compute role."""
    end = HALVES * WARPS_PER_WARPGROUP
    if cfg.kv_load is KvLoad.GATHER:
        regs = 216
        loading = Role("load", warps=(end, end + HALVES * GATHERERS), regs=72, body=gather, instances=HALVES)
    elif cfg.converts_kv:
        regs, loading = 208, Role("load", warps=(end, end + WARPS_PER_WARPGROUP), regs=88, body=convert)
    else:
        regs, loading = 240, Role("load", warps=(end, end + 1), regs=24, body=load)
    return RoleTable(
        (
            Role("even", warps=(0, WARPS_PER_WARPGROUP), regs=regs, body=even),
            Role("odd", warps=(WARPS_PER_WARPGROUP, end), regs=regs, body=odd),
            loading,
        )
    )


def channels(cfg: LatentConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>. P brings the maxima of its rows, see `Member`.

    A part of V that a warpgroup loads anew says that the other one is done with the block there, and with its P. P of a
    block takes the place of its tail, which is free when the other warpgroup has released its part of V, and with it P.
    """
    memory, both = Carries.ASYNC_SMEM, ("even", "odd")
    filled = _FILLED[cfg.kv_load]
    sides = {"even": "left", "odd": "right"}  # the columns of V of each
    others = {"even": "odd", "odd": "even"}
    parts = [
        Channel(f"load_both_{side}", "load", both, filled, By.WGMMA, STAGES, memory, releaser=role)
        for role, side in sides.items()
    ]
    if cfg.has_tail:
        parts += [
            Channel(f"load_{role}_tail", "load", role, filled, Implied(f"load_both_{sides[other]}", "free"), 1, memory)
            for role, other in others.items()
        ]
    scores = [
        Channel(f"{role}_{other}_P", role, other, By.WARP, Implied(f"load_both_{sides[other]}"), 1, memory)
        for role, other in others.items()
    ]
    q = Channel("load_both_Q", "load", both, By.TMA, By.WGMMA if cfg.persistent else ONCE, 1, memory)
    return ChannelTable((q, *parts, *scores), roles(cfg))


def smem_map(cfg: LatentConfig, table: ChannelTable) -> SmemMap:
    pairs = HALVES * ROWS * 8  # two numbers for each row
    return SmemMap(
        Region("Q", cfg.q_tile.nbytes, align=1024),
        Region("K and P", STAGES * cfg.stage_bytes, align=1024),
        Region("states", pairs),
        Region("sums", pairs),
        Region("barriers", table.nbytes, align=8),
    )


def context(args: ForwardKernelArguments, cfg: LatentConfig, table: ChannelTable, smem: SmemMap) -> LatentContext:
    return LatentContext(args, cfg, table, smem)


KERNEL = ForwardKernel("sm90.latent", channels, smem_map, context)
