"""Latent forward: roles, channels and shared-memory map. Read this file first.

Decoding of latent attention has few query rows, all heads of which share one key/value head of up to 576 columns; V is
the first 512 of them. So a block is loaded once, as K and as V. O of 64 rows fills the registers of two warpgroups,
half of the columns each. They take turns at the key blocks: the even blocks' scores and softmax are one warpgroup's,
the odd ones' the other's. Each multiplies all P with its half of V. P and the rows' maxima go through shared memory.

While one warpgroup computes the softmax of a block, the products of the two blocks before it run, and the scores of the
next one.
"""

from __future__ import annotations

from ...fwd.launch import ForwardKernel, ForwardKernelArguments
from ...pipeline.channels import By, Carries, Channel, ChannelTable
from ...pipeline.roles import WARPS_PER_WARPGROUP, Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from ..wgmma import ROWS
from .compute import even, odd
from .config import HALVES, STAGES, LatentConfig, LatentContext
from .load import load

ROLES = RoleTable(
    (
        Role("even", warps=(0, WARPS_PER_WARPGROUP), regs=240, body=even),
        Role("odd", warps=(WARPS_PER_WARPGROUP, 2 * WARPS_PER_WARPGROUP), regs=240, body=odd),
        Role("load", warps=(2 * WARPS_PER_WARPGROUP, 2 * WARPS_PER_WARPGROUP + 1), regs=24, body=load),
    )
)


def channels(cfg: LatentConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>. P brings the maxima of its rows, see `RowStates`."""
    memory, both = Carries.ASYNC_SMEM, ("even", "odd")
    return ChannelTable(
        (
            Channel("load_both_Q", "load", both, By.TMA, By.WGMMA, 1, memory),
            Channel("load_both_KV", "load", both, By.TMA, By.WGMMA, STAGES, memory),
            Channel("even_both_P", "even", both, By.WARP, By.WGMMA, 1, memory),
            Channel("odd_both_P", "odd", both, By.WARP, By.WGMMA, 1, memory),
        ),
        ROLES,
    )


def smem_map(cfg: LatentConfig, table: ChannelTable) -> SmemMap:
    pairs = HALVES * ROWS * 8  # two numbers for each row
    return SmemMap(
        Region("Q", cfg.q_tile.nbytes, align=1024),
        Region("K", STAGES * cfg.k_tile.nbytes, align=1024),
        Region("P", cfg.p_tile.nbytes, align=1024),
        Region("states", pairs),
        Region("sums", pairs),
        Region("barriers", table.nbytes, align=8),
    )


def context(args: ForwardKernelArguments, cfg: LatentConfig, table: ChannelTable, smem: SmemMap) -> LatentContext:
    return LatentContext(args, cfg, table, smem)


KERNEL = ForwardKernel("sm90.latent", channels, smem_map, context)
