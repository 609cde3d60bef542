"""Hopper forward kernel: roles, channels and shared-memory map. Read this file first.

A CTA owns a tile of query rows, 64 per consumer warpgroup, and iterates over the key blocks from last to first. Each
consumer does all work of its rows: S = Q K^T, softmax in registers, O += P V with P from registers. The consumers use
the tensor cores in ping-pong order, so the softmax of one consumer overlaps with the products of the others. One
producer warp loads one work tile ahead. In a persistent grid, another warp takes the work tiles.

Optional parts: A cluster of two CTAs can share a tile with twice the rows; each CTA then multicasts half of every K and
V block to both. For 8-bit K and V, a warpgroup converts them to 16-bit tiles; it gets the bytes through shared memory
or loads them itself. A gather warpgroup copies rows that TMA cannot load.
"""

from __future__ import annotations

from ...fwd.device.queue import PLACE_BYTES
from ...fwd.launch import ForwardKernel, ForwardKernelArguments
from ...fwd.variant import KvLoad, OutStore
from ...pipeline.channels import By, Carries, Channel, ChannelTable, ClusterSharing, Every
from ...pipeline.roles import WARPS_PER_WARPGROUP, Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from .compute import compute
from .config import Sm90ForwardConfig
from .context import Sm90ForwardContext
from .convert import convert
from .gather import gather
from .load import load
from .schedule import schedule


def roles(cfg: Sm90ForwardConfig) -> RoleTable:
    end = cfg.consumers * WARPS_PER_WARPGROUP
    compute_regs, load_regs, helper_regs = cfg.regs
    table = [Role("compute", warps=(0, end), regs=compute_regs, body=compute, instances=cfg.consumers)]
    helpers = ("convert", convert, cfg.converts_kv), ("gather", gather, cfg.kv_load is KvLoad.GATHER)
    for name, body, is_used in helpers:
        if is_used:
            table.append(Role(name, warps=(end, end + WARPS_PER_WARPGROUP), regs=helper_regs, body=body))
            end += WARPS_PER_WARPGROUP
    table.append(Role("load", warps=(end, end + 1), regs=load_regs, body=load))
    if cfg.has_counter:
        table.append(Role("schedule", warps=(end + 1, end + 2), regs=load_regs, body=schedule))
    return RoleTable(tuple(table))


def channels(cfg: Sm90ForwardConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>. Q has `q_buffers` stages per consumer. All consumers read the
    same K and V rings. 8-bit K and V have rings of their own."""
    source, filled_by = ("gather", By.WARP) if cfg.kv_load is KvLoad.GATHER else ("load", By.TMA)
    memory, consumers = Carries.ASYNC_SMEM, Every("compute")
    # Q is free after the loads into registers, after the stores of O staged over it, or after the products.
    q_freed_by = By.WARP if cfg.holds_q or cfg.out_store is OutStore.TMA_OVER_Q else By.WGMMA
    queries = Channel("load_compute_Q", "load", "compute", By.TMA, q_freed_by, cfg.q_buffers * cfg.consumers, memory)
    shared = (cfg.ctas, ClusterSharing.MULTICAST) if cfg.ctas > 1 else ()
    kv_channels: list[Channel] = []
    for x in ("K", "V"):
        if cfg.converts_kv:
            if cfg.kv_load is not KvLoad.FETCH:
                fp8_ring = f"{source}_convert_{x}", source, "convert", filled_by, By.WARP, cfg.kv8_stages
                kv_channels.append(Channel(*fp8_ring, memory))
            kv_channels.append(
                Channel(f"convert_compute_{x}", "convert", consumers, By.WARP, By.WGMMA, cfg.stages, memory)
            )
        else:
            ring = f"{source}_compute_{x}", source, consumers, filled_by, By.WGMMA, cfg.stages, memory
            kv_channels.append(Channel(*ring, *shared))
    if cfg.has_counter:
        readers, pair = (consumers, "load", "schedule"), (cfg.ctas, ClusterSharing.PAIR) if cfg.ctas > 1 else ()
        stored_by = By.STORE if cfg.ctas > 1 else By.WARP
        place = Channel("schedule_all_place", "schedule", readers, stored_by, By.WARP, 1, Carries.SMEM, *pair)
        kv_channels.append(place)
    return ChannelTable((queries, *kv_channels), roles(cfg))


def smem_map(cfg: Sm90ForwardConfig, table: ChannelTable) -> SmemMap:
    over = "Q" if cfg.out_store is OutStore.TMA_OVER_Q else None
    out = Region("O", (cfg.consumers - 1) * cfg.o_step + cfg.o_bytes, align=1024, over=over)
    fp8_regions = (
        (
            Region("K bytes", cfg.kv8_stages * cfg.k_tile.nbytes, align=1024),
            Region("V bytes", cfg.kv8_stages * cfg.v_tile.nbytes, align=1024),
        )
        if cfg.kv8_stages
        else ()
    )
    return SmemMap(
        Region("Q", cfg.q_buffers * cfg.consumers * cfg.q_step, align=1024),
        Region("K", cfg.stages * cfg.k_operand.nbytes, align=1024),
        Region("V", cfg.stages * cfg.v_operand.nbytes, align=1024),
        *fp8_regions,
        *(() if cfg.out_store is OutStore.DIRECT else (out,)),
        Region("barriers", table.nbytes, align=8),
        *((Region("place", PLACE_BYTES, align=PLACE_BYTES),) if cfg.has_counter else ()),
    )


def context(
    args: ForwardKernelArguments, cfg: Sm90ForwardConfig, table: ChannelTable, smem: SmemMap
) -> Sm90ForwardContext:
    return Sm90ForwardContext(args, cfg, table, smem, cluster=cfg.ctas)


KERNEL = ForwardKernel("sm90.forward", channels, smem_map, context)
