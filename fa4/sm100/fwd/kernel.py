"""The Blackwell forward. Read this module first: it has the tables of roles, channels and memory.

A CTA owns two Q tiles of 128 rows and takes the key blocks from last to first. The tiles ping-pong: while one tile is
in softmax, the products of the other run. Per key block and Q tile, S = Q K^T goes to tensor memory. A softmax
warpgroup (one thread per row) reads S and writes P = exp2(S - max) over it in 16 bits. O += P V accumulates in tensor
memory. If a row max has grown, the correction warpgroup rescales O before the next product; it normalises O at the end.

For head dims above 128, O takes up to 256 columns of tensor memory: a CTA has one Q tile with two S. The matrix unit
computes the next S during the softmax of this one, before O += P V.

With e4m3 operands, two Q tiles have their P in shared memory (`cfg.p_in_smem`). S is free once it is in registers, so
its next product runs during the softmax of this one, and softmax never waits for a product of its own tile. Softmax
itself rescales O, seldom; correction only normalises it.

Two CTAs can work as a pair (`cfg.ctas`, see `config`): the leader issues the products of both. For head dims (192, 128)
and above, correction stores O of a pair itself, because Q and a staged O would leave too few K/V stages.

With few queries memory bandwidth is the limit. A CTA then owns one Q tile (pack_gqa) and a part of the keys (split-KV).
Its K/V ring takes all remaining shared memory, two CTAs share an SM, and correction stores O itself. The same design
serves two other cases with any number of queries: K and V of 8 or 4 bits, which the role `convert` upconverts, and rows
that TMA cannot load, which the role `gather` copies.
"""

from __future__ import annotations

from ...fwd.launch import ForwardKernel, ForwardKernelArguments
from ...fwd.variant import KvLoad, OutStore
from ...pipeline.channels import By, Carries, Channel, ChannelTable, ClusterSharing, Every, Implied, Side
from ...pipeline.roles import Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from .. import tmem
from ..mma import CHUNK_COLUMNS
from ..signals import SIGNALS
from .config import Schedule, Sm100ForwardConfig
from .context import Sm100ForwardContext
from .convert import convert
from .correction import correction
from .epilogue import epilogue
from .gather import gather
from .load import load
from .mma import mma
from .schedule import schedule
from .softmax import softmax

SOFTMAX_REGS = {1: 192, 2: 120}  # registers per thread, by CTAs per SM
CORRECTION_REGS = {1: 72, 2: 64}
HELPER_REGS = 80  # of the roles convert and gather
FETCH_REGS = 128  # of convert, if it loads K and V of a block ahead


def roles(cfg: Sm100ForwardConfig) -> RoleTable:
    """Roles: a softmax warpgroup per Q tile, correction, if needed convert and gather, and the single-warp roles."""
    first = 4 * cfg.q_tiles
    correction_role = Role("correction", warps=(first, first + 4), regs=CORRECTION_REGS[cfg.per_sm], body=correction)
    warpgroups = [correction_role]
    for name, body, exists in (("convert", convert, cfg.converts_kv), ("gather", gather, cfg.kv_load is KvLoad.GATHER)):
        if exists:
            end = warpgroups[-1].warps[1]
            regs = FETCH_REGS if cfg.kv_load is KvLoad.FETCH else HELPER_REGS
            warpgroups.append(Role(name, warps=(end, end + 4), regs=regs, body=body))
    single = [("mma", mma), ("load", load), ("epilogue", epilogue), ("schedule", schedule)]
    if cfg.out_store is OutStore.DIRECT:
        single.remove(("epilogue", epilogue))
    next_warp = warpgroups[-1].warps[1]
    singles = (
        Role(name, warps=(warp, warp + 1), regs=56, body=body) for warp, (name, body) in enumerate(single, next_warp)
    )
    return RoleTable(
        (
            Role("softmax", warps=(0, first), regs=SOFTMAX_REGS[cfg.per_sm], body=softmax, instances=cfg.q_tiles),
            *warpgroups,
            *singles,
        ),
        cfg.per_sm,
    )


def tmem_map(cfg: Sm100ForwardConfig) -> tmem.TmemMap:
    """TMEM map: S and one O per Q tile; P aliases the second half of each S, if it is there. Then come the scales of
    blocks: of Q and P of each Q tile, of K or V of each stage."""
    s_columns, half = cfg.s_buffers * cfg.tile_n, cfg.tile_n // 2
    p = {} if cfg.p_in_smem else dict(P=tmem.alias_of("S", columns=s_columns - half, offset=half))
    sizes = dict(O=cfg.q_tiles * cfg.o_columns)
    if cfg.has_block_scales:
        sizes["Q_scales"], sizes["P_scales"] = cfg.q_tiles * cfg.scale_columns, cfg.q_tiles * CHUNK_COLUMNS
        sizes["KV_scales"] = cfg.kv_stages * cfg.scale_columns
    ranges, first = dict(S=tmem.cols(0, s_columns), **p), s_columns
    for name, columns in sizes.items():
        ranges[name] = tmem.cols(first, columns)
        first += columns
    return tmem.TmemMap(**ranges)


NEXT_S = Implied("mma_softmax_S")
FREE_S = Implied("mma_softmax_S", "free")


def channels(cfg: Sm100ForwardConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>: one stage per Q tile, except the K/V ring. A pair shares those
    of mma."""
    sharing = ClusterSharing.PAIR if cfg.ctas == 2 else ClusterSharing.NOTHING

    def shared(name, producer, consumer, filled, freed, stages, carries) -> Channel:
        return Channel(name, producer, consumer, filled, freed, stages, carries, cfg.ctas, sharing)

    if cfg.out_store is OutStore.TMA_OVER_Q:  # Q is free when the O staged over it has been stored
        q = Channel("load_mma_Q", "load", "mma", By.TMA, By.WARP, cfg.q_tiles, Carries.ASYNC_SMEM, releaser="epilogue")
    else:
        q = shared("load_mma_Q", "load", "mma", By.TMA, By.UMMA, cfg.q_tiles, Carries.ASYNC_SMEM)
    loader, filled = ("gather", By.WARP) if cfg.kv_load is KvLoad.GATHER else ("load", By.TMA)
    kv: tuple[Channel, ...]
    if cfg.converts_kv:
        raw = f"{loader}_convert_KV", loader, "convert", filled, By.WARP, cfg.kv8_stages
        converted = "convert_mma_KV", "convert", "mma", By.WARP, By.UMMA, cfg.kv_stages
        rings = (converted,) if cfg.kv_load is KvLoad.FETCH else (raw, converted)
        kv = tuple(Channel(*ring, Carries.ASYNC_SMEM) for ring in rings)
    else:
        kv = (shared(f"{loader}_mma_KV", loader, "mma", filled, By.UMMA, cfg.kv_stages, Carries.ASYNC_SMEM),)
    norm = Channel("softmax_correction_norm", "softmax", "correction", By.WARP, By.WARP, cfg.q_tiles, Carries.SMEM)
    rows: tuple[Channel, ...]
    if cfg.p_in_smem:
        rows = (
            q,
            *kv,
            shared("mma_softmax_S", "mma", "softmax", By.UMMA, By.WARP, cfg.q_tiles, Carries.TMEM),
            # Full means: P is stored, and O is ready for the next addition. Free: that addition is done.
            shared("softmax_mma_P", "softmax", "mma", By.WARP, By.UMMA, cfg.q_tiles, Carries.ASYNC_SMEM | Carries.TMEM),
            norm,
            shared("mma_correction_O", "mma", "correction", By.UMMA, By.WARP, cfg.q_tiles, Carries.TMEM),
        )
    else:
        rows = (
            q,
            *kv,
            # Free means: the P head is written over S, and O is ready for the next addition. The next S needs no wait
            # of its own: the matrix unit works in order, and the PV product before it waited for this.
            shared("mma_softmax_S", "mma", ("softmax", "correction"), By.UMMA, By.WARP, cfg.s_buffers, Carries.TMEM),
            # Implied: the next S is issued after the product that reads P.
            shared("softmax_mma_Ptail", "softmax", "mma", By.WARP, NEXT_S, cfg.s_buffers, Carries.TMEM),
            Channel("softmax_correction_scale", "softmax", "correction", By.WARP, By.WARP, cfg.s_buffers, Carries.SMEM),
            norm,
            # Implied: correction has read O before it frees the S of the next product to O.
            shared("mma_correction_O", "mma", "correction", By.UMMA, FREE_S, cfg.q_tiles, Carries.TMEM),
        )
    storing_roles: tuple[str, ...] = ("correction",)
    if cfg.out_store is not OutStore.DIRECT:
        staged = "correction_epilogue_O", "correction", "epilogue", By.WARP, By.READ, cfg.q_tiles
        rows += (Channel(*staged, Carries.ASYNC_SMEM),)
        storing_roles = "correction", "epilogue"
    if cfg.schedule is Schedule.DYNAMIC:
        readers: tuple[Side, ...] = (Every("softmax"), *storing_roles, "mma", "load", "schedule")
        rows += (shared("schedule_all_index", "schedule", readers, By.STORE, By.WARP, 1, Carries.ASYNC_SMEM),)
    return ChannelTable(rows, roles(cfg), SIGNALS)


def smem_map(cfg: Sm100ForwardConfig, table: ChannelTable) -> SmemMap:
    out_bytes = (cfg.q_tiles - 1) * cfg.o_step + cfg.o_tile.nbytes
    out = Region("O", out_bytes, align=1024, over="Q" if cfg.out_store is OutStore.TMA_OVER_Q else None)
    return SmemMap(
        Region("Q", cfg.q_tiles * cfg.q_tile.nbytes, align=1024),
        Region("KV", cfg.kv_stages * cfg.kv_stage_bytes, align=1024),
        *((Region("KV bytes", cfg.kv8_stages * cfg.kv8_stage_bytes, align=1024),) if cfg.kv8_stages else ()),
        *(() if cfg.out_store is OutStore.DIRECT else (out,)),
        *((Region("P", cfg.p_bytes, align=1024),) if cfg.p_in_smem else ()),
        *(() if cfg.p_in_smem else (Region("scale", cfg.s_stages * cfg.rows_bytes),)),
        *_scale_regions(cfg),
        Region("norm", cfg.rows_bytes),
        Region("barriers", table.nbytes, align=8),
        Region("tmem", 4),
        Region("index", 16),
    )


def _scale_regions(cfg: Sm100ForwardConfig) -> tuple[Region, ...]:
    counts = (("Q scales", cfg.q_tiles), ("KV scales", cfg.kv_stages)) if cfg.has_block_scales else ()
    return tuple(Region(name, count * cfg.scale_bytes) for name, count in counts)


def context(
    args: ForwardKernelArguments, cfg: Sm100ForwardConfig, table: ChannelTable, smem: SmemMap
) -> Sm100ForwardContext:
    memory = tmem.TensorMemory(table.roles["correction"].warps[0], cfg.ctas, cfg.per_sm)  # any warp can allocate
    return Sm100ForwardContext(args, cfg, table, smem, memory, cfg.ctas, tmem_map(cfg))


KERNEL = ForwardKernel("sm100.forward", channels, smem_map, context, clusters=True, is_cutlass=False)
