"""The Blackwell backward. Read this module first: it has the tables of roles, channels and memory.

A CTA owns a block of 128 keys. For each query head of the group it loops over the query blocks that see the keys: dK
and dV accumulate in tensor memory and are written once. Scores are transposed (a lane is a key). Per step:
S^T = K Q^T and dP^T = V dO^T; P^T and dS^T overwrite them in 16 bits and are the left operands of dV += P^T dO and
dK += dS^T Q; dQ = dS K goes through shared memory and is added to a float32 accumulator. A kernel before it computes
row statistics and clears the accumulator; a kernel after it converts the accumulator to dQ.

Two CTAs can work as a pair (`cfg.ctas`, see `config`) on 256 keys. Both compute every product together, with the right
operand split between their shared memories. They exchange halves of dS, so each adds dQ of half of the queries.
"""

from __future__ import annotations

from ...bwd.launch import BackwardKernel, BackwardKernelArguments
from ...pipeline import kernel as kernels
from ...pipeline.channels import ONCE, By, Carries, Channel, ChannelTable, ClusterSharing, Implied
from ...pipeline.roles import Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from .. import tmem
from ..mma import CHUNK_COLUMNS
from ..signals import SIGNALS
from .compute import compute
from .config import CHUNK_BYTES, DQ_STAGES, ROW_STAGES, Sm100BackwardConfig
from .context import Sm100BackwardContext
from .load import load
from .mma import mma
from .reduce import reduce

ROLES = RoleTable(
    (
        Role("compute", warps=(0, 8), regs=168, body=compute),
        Role("reduce", warps=(8, 12), regs=96, body=reduce),
        Role("mma", warps=(12, 13), regs=80, body=mma),
        Role("load", warps=(13, 14), regs=80, body=load),
    )
)
TMEM_AND_SMEM = Carries.TMEM | Carries.ASYNC_SMEM  # dS: in TMEM for dK, in shared memory for dQ


def tmem_map(cfg: Sm100BackwardConfig) -> tmem.TmemMap:
    """TMEM map. P and dS alias S and dP in two packed halves, one at each end. dQ aliases dP (a pair's dQ between the
    halves of dS) unless small head dims leave room for it. Scales of blocks come last."""
    dp = cfg.tile_m + cfg.columns_v
    dk = dp + cfg.tile_m
    ranges = dict(
        S=tmem.cols(0, cfg.tile_m),
        P=tmem.alias_of("S", columns=cfg.tile_m),
        dV=tmem.cols(cfg.tile_m, cfg.columns_v),
        dP=tmem.cols(dp, cfg.tile_m),
        dS=tmem.alias_of("dP", columns=cfg.tile_m),
        dK=tmem.cols(dk, cfg.columns),
    )
    if cfg.dq_over_dp and not cfg.dq_transposed:
        offset = cfg.tile_m // 4 if cfg.ctas == 2 else 0
        ranges.update(dQ=tmem.alias_of("dP", columns=cfg.dq_columns, offset=offset))
    else:
        ranges.update(dQ=tmem.cols(dk + cfg.columns, cfg.dq_columns))
    if cfg.dq_transposed:
        ranges.update(dQ_high=tmem.alias_of("dP", columns=cfg.tile_m))
    if cfg.has_block_scales:
        sizes = {f"{name}_scales": n * cfg.scale_columns(name) for name, n in scale_stages(cfg).items()}
        first = tmem.TmemMap(**ranges).end
        for name, columns in dict(ones=CHUNK_COLUMNS, **sizes).items():
            ranges[name] = tmem.cols(first, columns)
            first += columns
    return tmem.TmemMap(**ranges)


def scale_stages(cfg: Sm100BackwardConfig) -> dict[str, int]:
    """Stages of the scales of blocks of each tile that has any."""
    stages = dict(K=1, V=1, Q=cfg.q_stages, dO=cfg.do_stages)
    return {name: stages[name] for name in cfg.scale_chunks}


def channels(cfg: Sm100BackwardConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>. A pair shares all but the row statistics."""
    sharing = ClusterSharing.PAIR if cfg.ctas == 2 else ClusterSharing.NOTHING

    def channel(name, producer, consumer, filled, freed, stages, carries) -> Channel:
        return Channel(name, producer, consumer, filled, freed, stages, carries, cfg.ctas, sharing)

    columns: tuple[Channel, ...] = ()
    if cfg.ctas == 2:
        columns = (
            channel("load_mma_Kcolumns", "load", "mma", By.TMA, ONCE, 1, Carries.ASYNC_SMEM),
            channel("load_mma_Qcolumns", "load", "mma", By.TMA, By.UMMA, 1, Carries.ASYNC_SMEM),
            channel("load_mma_dOcolumns", "load", "mma", By.TMA, By.UMMA, 1, Carries.ASYNC_SMEM),
        )
    # Implied: compute reads the statistics before it writes dS, and dK = dS^T Q, which reads dS, frees this Q.
    dk_frees_q = Implied("load_mma_Qcolumns" if cfg.ctas == 2 else "load_mma_Q", "free")
    return ChannelTable(
        (
            channel("load_mma_K", "load", "mma", By.TMA, ONCE, 1, Carries.ASYNC_SMEM),
            channel("load_mma_V", "load", "mma", By.TMA, ONCE, 1, Carries.ASYNC_SMEM),
            channel("load_mma_Q", "load", "mma", By.TMA, By.UMMA, cfg.q_stages, Carries.ASYNC_SMEM),
            channel("load_mma_dO", "load", "mma", By.TMA, By.UMMA, cfg.do_stages, Carries.ASYNC_SMEM),
            *columns,
            Channel("load_compute_rows", "load", "compute", By.TMA, dk_frees_q, ROW_STAGES, Carries.SMEM),
            # Implied: S and dP are free when the products that read P and dS, which alias them, have been issued,
            # because the matrix unit works in order.
            channel("mma_compute_S", "mma", "compute", By.UMMA, Implied("compute_mma_P"), 1, Carries.TMEM),
            channel("mma_compute_dP", "mma", "compute", By.UMMA, Implied("compute_mma_dS"), 1, Carries.TMEM),
            # Implied: P has been read when the next S is full, dS when the next dP is full (dQ was issued before it).
            channel("compute_mma_P", "compute", "mma", By.WARP, Implied("mma_compute_S"), 1, Carries.TMEM),
            channel("compute_mma_dS", "compute", "mma", By.WARP, Implied("mma_compute_dP"), 1, TMEM_AND_SMEM),
            channel("mma_reduce_dQ", "mma", "reduce", By.UMMA, By.WARP, cfg.dq_parts, Carries.TMEM),
            channel("mma_compute_dV", "mma", "compute", By.UMMA, ONCE, 1, Carries.TMEM),
            channel("mma_compute_dK", "mma", "compute", By.UMMA, ONCE, 1, Carries.TMEM),
        ),
        ROLES,
        SIGNALS,
    )


def smem_map(cfg: Sm100BackwardConfig, table: ChannelTable) -> SmemMap:
    columns: tuple[Region, ...] = ()
    if cfg.ctas == 2:
        columns = (
            Region("Kcolumns", cfg.k_columns.nbytes, align=1024),
            Region("Qcolumns", cfg.q_columns.nbytes, align=1024),
            Region("dOcolumns", cfg.do_columns.nbytes, align=1024),
        )
    return SmemMap(
        Region("K", cfg.kv_bytes[0], align=1024),
        Region("V", cfg.kv_bytes[1], align=1024),
        Region("Q", cfg.q_stages * cfg.q_tile.nbytes, align=1024),
        Region("dO", cfg.do_stages * cfg.do_tile.nbytes, align=1024),
        *columns,
        *(Region(f"{name} scales", n * cfg.scale_bytes(name), align=128) for name, n in scale_stages(cfg).items()),
        Region("dS", cfg.ds_tile.nbytes, align=1024),
        Region("dQ", DQ_STAGES * CHUNK_BYTES, align=128),
        Region("rows", ROW_STAGES * cfg.rows_bytes, align=128),
        Region("barriers", table.nbytes, align=8),
        Region("tmem", 4),
        Region("zero", 4),  # see `mma.smem_address`
    )


def context(
    args: BackwardKernelArguments, cfg: Sm100BackwardConfig, table: ChannelTable, smem: SmemMap
) -> Sm100BackwardContext:
    memory = tmem.TensorMemory(ROLES["reduce"].warps[0], cfg.ctas)
    return Sm100BackwardContext(args, cfg, table, smem, memory, cfg.ctas, tmem_map(cfg))


KERNEL = BackwardKernel("sm100.backward", channels, smem_map, context, clusters=True, overlap=kernels.Overlap.NOTHING)
