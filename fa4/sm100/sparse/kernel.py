"""Sparse backward: roles, channels and memory. Read this file first.

Each query has lists of rows of K and V. A pair of CTAs has up to 128 query heads that share a key/value head of a list,
64 in each CTA, and iterates over blocks of 128 listed keys, 64 of each CTA. A step computes S = Q K^T and dP = dO V^T,
P and dS, then dQ += dS K, dV = P^T dO and dK = dS^T Q. dQ stays in tensor memory for the whole list. dV and dK of a
step leave it, 128 columns at a time, and are added to float32 sums in global memory.

All products have 128 rows and 128 columns, of which a CTA has half; lanes 64 to 127 of its tensor memory hold the
second half of the columns (see `sm100.stages`). Q and dO stay in shared memory as left operands. Right operands come
through one ring, 64 rows and 64 columns at a time: rows of K and V for S and dP, and columns of K, dO and Q for the
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...bwd.lists import SparseArguments, SparseBackwardKernel, SparseTensors
from ...pipeline import kernel as kernels
from ...pipeline.channels import ONCE, By, Carries, Channel, ChannelTable, ClusterSharing, Implied
from ...pipeline.roles import Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from ...pipeline.tma import TmaTile
from .. import tmem
from ..signals import SIGNALS
from ..stages import PAIR
from .compute import compute
from .config import D_COLUMNS, STATISTICS_BYTES, UNIT, Gradient, Sm100SparseConfig
from .context import Sm100SparseContext
from .load import load
from .maps import Maps, list_rows
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


def tmem_map(cfg: Sm100SparseConfig) -> tmem.TmemMap:
    """TMEM map: S, dP, dQ, and two products of dV or dK, of which one lies over dP."""
    dq = cfg.parts(Gradient.DQ) * D_COLUMNS
    return tmem.TmemMap(
        S=tmem.cols(0, D_COLUMNS), dP=tmem.cols(D_COLUMNS, D_COLUMNS), odd=tmem.alias_of("dP", D_COLUMNS),
        even=tmem.cols(2 * D_COLUMNS, D_COLUMNS), dQ=tmem.cols(3 * D_COLUMNS, dq),
    )  # fmt: skip


def channels(cfg: Sm100SparseConfig) -> ChannelTable:
    """Channels of both CTAs together, named <producer>_<consumer>_<payload>. even, odd: products of dV and dK."""

    def shared(name, producer, consumer, filled, freed, carries, stages=1) -> Channel:
        return Channel(name, producer, consumer, filled, freed, stages, carries, PAIR, ClusterSharing.PAIR)

    smem, both = Carries.ASYNC_SMEM, Carries.ASYNC_SMEM | Carries.TMEM
    # Implied: P and dS have been read when dP is full again, because the matrix unit works in order.
    do = (shared("load_mma_dO", "load", "mma", By.TMA, ONCE, smem),) if cfg.keeps_do else ()
    return ChannelTable(
        (
            shared("load_mma_Q", "load", "mma", By.TMA, ONCE, smem),
            *do,
            shared("load_mma_right", "load", "mma", By.TMA, By.UMMA, smem, cfg.ring_stages),
            shared("mma_compute_S", "mma", "compute", By.UMMA, By.WARP, Carries.TMEM),
            shared("mma_compute_dP", "mma", "compute", By.UMMA, Implied("compute_mma_weights"), Carries.TMEM),
            shared("compute_mma_weights", "compute", "mma", By.WARP, Implied("mma_compute_dP"), both),
            shared("mma_reduce_even", "mma", "reduce", By.UMMA, By.WARP, Carries.TMEM),
            shared("mma_reduce_odd", "mma", "reduce", By.UMMA, By.WARP, Carries.TMEM),
            shared("mma_compute_dQ", "mma", "compute", By.UMMA, ONCE, Carries.TMEM),
        ),
        ROLES,
        SIGNALS,
    )


def smem_map(cfg: Sm100SparseConfig, table: ChannelTable) -> SmemMap:
    do = (Region("dO", cfg.do_tile.nbytes, align=1024),) if cfg.keeps_do else ()
    return SmemMap(
        Region("Q", cfg.q_tile.nbytes, align=1024),
        *do,
        Region("P", cfg.by_heads.nbytes, align=1024),
        Region("dS", cfg.by_heads.nbytes, align=1024),
        Region("dS_keys", cfg.by_keys.nbytes, align=1024),
        Region("right", cfg.ring_stages * UNIT.nbytes, align=1024),
        Region("statistics", STATISTICS_BYTES),
        Region("barriers", table.nbytes, align=8),
        Region("tmem", 4),
    )


def context(args: SparseArguments, cfg: Sm100SparseConfig, table: ChannelTable, smem: SmemMap) -> Sm100SparseContext:
    memory = tmem.TensorMemory(ROLES["mma"].warps[0], PAIR)
    return Sm100SparseContext(args, cfg, table, smem, memory, PAIR, tmem_map(cfg))


@dataclass(frozen=True, slots=True, repr=False)
class Sm100SparseBackward(SparseBackwardKernel[Sm100SparseConfig]):
    """The kernel and its launch."""

    def maps(self, tensors: SparseTensors, cfg: Sm100SparseConfig) -> Maps:
        matrices = tensors.q, tensors.dout, list_rows(tensors.k), list_rows(tensors.v)
        tiles = cfg.q_tile, cfg.do_tile, cfg.k_tile, cfg.v_tile
        return Maps(*(TmaTile.load(x, tile, PAIR).map for x, tile in zip(matrices, tiles)))


KERNEL = Sm100SparseBackward(
    "sm100.sparse_backward", channels, smem_map, context, clusters=True, overlap=kernels.Overlap.NOTHING
)
