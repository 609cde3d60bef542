"""Transposed sparse backward: roles, channels and memory. Read this file first.

Each query has lists of rows of K and V. A CTA has up to 64 query heads that share a key/value head of a list, and
iterates over blocks of 128 listed keys. With heads as rows of products, half of the 128 rows would be empty. So keys
are the rows, and heads the columns: a step computes S^T = K Q^T and dP^T = V dO^T, P and dS, then dV = P^T dO,
dK = dS^T Q and dQ^T += K^T dS^T.

Q and dO stay in shared memory: they are the right operands of scores by their columns, and of dK and dV by their rows.
K and V come through a ring as left operands, K a second time for dQ. P and dS of a step are the left operands of dV and
dK, in tensor memory. dQ^T stays there for the whole list. dV and dK of a step leave it, 64 columns at a time, and are
added to float32 sums in global memory, which takes nearly as long as the products of a step. So there are such products
at any time: while S of the next step is computed over one of two places, they use the other one, over dP, and the
reverse.
"""

from __future__ import annotations

from dataclasses import dataclass

from ....bwd.lists import SparseArguments, SparseBackwardKernel, SparseTensors
from ....pipeline import kernel as kernels
from ....pipeline.channels import ONCE, By, Carries, Channel, ChannelTable, Implied
from ....pipeline.roles import Role, RoleTable
from ....pipeline.smem import Region, SmemMap
from ....pipeline.tma import TmaTile
from ... import tmem
from ...signals import SIGNALS
from ..config import STATISTICS_BYTES
from ..maps import Maps, list_rows
from .compute import compute
from .config import BY_COLUMNS, DS_TILE, HEADS, INSTANCES, WORD_COLUMNS, Sm100TransposedConfig
from .context import Sm100TransposedContext
from .load import load
from .mma import mma
from .mma_dkv import mma_dkv
from .reduce import reduce

ROLES = RoleTable(
    (
        Role("compute", warps=(0, 8), regs=112, body=compute),
        Role("reduce", warps=(8, 16), regs=96, body=reduce, instances=INSTANCES),
        Role("mma", warps=(16, 17), regs=64, body=mma),
        Role("mma_dkv", warps=(17, 18), regs=64, body=mma_dkv),
        Role("load", warps=(18, 19), regs=64, body=load),
    )
)


def tmem_map(cfg: Sm100TransposedConfig) -> tmem.TmemMap:
    """TMEM map: S and dP, over which columns of dV and dK lie at other times; P, dS, dQ."""
    return tmem.TmemMap(
        S=tmem.cols(0, HEADS), over_S=tmem.alias_of("S", HEADS),
        dP=tmem.cols(HEADS, HEADS), over_dP=tmem.alias_of("dP", HEADS),
        P=tmem.cols(2 * HEADS, WORD_COLUMNS), dS=tmem.cols(2 * HEADS + WORD_COLUMNS, WORD_COLUMNS),
        dQ=tmem.cols(3 * HEADS, cfg.dq_columns),
    )  # fmt: skip


def channels(cfg: Sm100TransposedConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>. over_S, over_dP: columns of dV and dK, of an instance of
    `reduce` in each stage."""
    smem, tensor, both_mma = Carries.ASYNC_SMEM, Carries.TMEM, ("mma", "mma_dkv")

    def place_of(name: str) -> Channel:
        """Channel of a place without columns of dV and dK. Implied: the place is used between two signals."""
        return Channel(
            f"mma_mma_over_{name}", "mma_dkv", "mma", By.WARP, Implied(f"mma_compute_{name}", "free"), 1, tensor
        )

    return ChannelTable(
        (
            Channel("load_mma_Q", "load", both_mma, By.TMA, ONCE, 1, smem),
            Channel("load_mma_dO", "load", both_mma, By.TMA, ONCE, 1, smem),
            Channel("load_mma_left", "load", "mma", By.TMA, By.UMMA, cfg.ring_stages, smem),
            # mma_dkv fills neither, but waits for their places.
            Channel("mma_compute_S", both_mma, "compute", By.UMMA, By.WARP, 1, tensor),
            Channel("mma_compute_dP", both_mma, "compute", By.UMMA, By.WARP, 1, tensor),
            place_of("S"),
            place_of("dP"),
            Channel("compute_mma_dS", "compute", "mma", By.WARP, By.UMMA, 1, smem),
            Channel("compute_mma_weights", "compute", "mma_dkv", By.WARP, By.UMMA, 1, tensor),
            Channel("mma_reduce_over_S", "mma_dkv", "reduce", By.UMMA, By.WARP, INSTANCES, tensor),
            Channel("mma_reduce_over_dP", "mma_dkv", "reduce", By.UMMA, By.WARP, INSTANCES, tensor),
            Channel("mma_compute_dQ", "mma", "compute", By.UMMA, ONCE, 1, tensor),
        ),
        ROLES,
        SIGNALS,
    )


def smem_map(cfg: Sm100TransposedConfig, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("Q", cfg.q_tile.nbytes, align=1024),
        Region("dO", cfg.do_tile.nbytes, align=1024),
        Region("dS", DS_TILE.nbytes, align=1024),
        Region("left", cfg.ring_stages * BY_COLUMNS.nbytes, align=1024),
        Region("statistics", STATISTICS_BYTES),
        Region("barriers", table.nbytes, align=8),
        Region("tmem", 4),
    )


def context(
    args: SparseArguments, cfg: Sm100TransposedConfig, table: ChannelTable, smem: SmemMap
) -> Sm100TransposedContext:
    memory = tmem.TensorMemory(ROLES["mma"].warps[0])
    return Sm100TransposedContext(args, cfg, table, smem, memory, 1, tmem_map(cfg))


@dataclass(frozen=True, slots=True, repr=False)
class Sm100TransposedSparseBackward(SparseBackwardKernel[Sm100TransposedConfig]):
    """The kernel and its launch."""

    def maps(self, tensors: SparseTensors, cfg: Sm100TransposedConfig) -> Maps:
        matrices = tensors.q, tensors.dout, list_rows(tensors.k), list_rows(tensors.v)
        tiles = cfg.q_tile, cfg.do_tile, cfg.k_tile, cfg.v_tile
        return Maps(*(TmaTile.load(x, tile).map for x, tile in zip(matrices, tiles)))


KERNEL = Sm100TransposedSparseBackward(
    "sm100.transposed_sparse_backward", channels, smem_map, context, overlap=kernels.Overlap.NOTHING
)
