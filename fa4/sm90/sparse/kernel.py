"""Sparse backward: roles, channels and shared-memory map. Read this file first.

Each query has lists of rows of K and V. A CTA has the query heads that share a key/value head of a list, as rows of its
tiles; it iterates over blocks of 64 listed keys, which two warps gather from global memory. A step computes S = Q K^T
and dP = dO V^T, P and dS, then dQ += dS K, dV = P^T dO and dK = dS^T Q. dQ stays in registers for the whole list. dV
and dK of a block leave through shared memory: a warp each adds them, row by row, to float32 sums in global memory.

There are two compute roles, dV and dK, which differ in the gradient of keys that they compute. With more than 64 rows,
each also has S, P, dS and dQ of 64 of them. Otherwise dV has S, P and dS, and dK has dQ.

P and dS of the next step are computed beside the last products of a step. P and dS go through shared memory, where the
products read them transposed.
"""

from __future__ import annotations

from ...bwd.lists import SparseBackwardKernel
from ...pipeline.channels import ONCE, By, Carries, Channel, ChannelTable
from ...pipeline.roles import Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from .add import add_dk, add_dv
from .compute import dk, dv
from .config import GATHERERS, STAGES, TILE_N, SparseBackwardConfig
from .context import Sm90SparseContext
from .gather import gather

ROLES = RoleTable(
    (
        Role("dV", warps=(0, 4), regs=224, body=dv),
        Role("dK", warps=(4, 8), regs=224, body=dk),
        Role("gather", warps=(8, 8 + GATHERERS), regs=56, body=gather),
        Role("add_dV", warps=(10, 11), regs=56, body=add_dv),
        Role("add_dK", warps=(11, 12), regs=56, body=add_dk),
    )
)


def channels(cfg: SparseBackwardConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>; "both": compute roles; "scores" and "dQ":
    those that compute S, and dQ."""
    both, memory = ("dV", "dK"), Carries.ASYNC_SMEM
    others = ("gather", "dV", "dK", "add_dK")
    start = (Channel("add_dV_all_start", "add_dV", others, By.WARP, ONCE, 1, Carries.SMEM),) if cfg.has_front else ()
    return ChannelTable(
        (
            *start,
            Channel("gather_both_Q", "gather", both, By.WARP, ONCE, 1, memory),
            Channel("gather_both_K", "gather", both, By.WARP, By.WGMMA, STAGES, memory),
            Channel("gather_scores_V", "gather", cfg.scorers, By.WARP, By.WGMMA, STAGES, memory),
            Channel("scores_dV_P", cfg.scorers, "dV", By.WARP, By.WGMMA, 1, memory),
            Channel("scores_dQ_dS", cfg.scorers, cfg.ds_readers, By.WARP, By.WGMMA, 1, memory),
            # The adding warp issues the fence between the threads' stores and its bulk copies.
            Channel("dV_add_dV", "dV", "add_dV", By.WARP, By.READ, 1, Carries.SMEM),
            Channel("dK_add_dK", "dK", "add_dK", By.WARP, By.READ, 1, Carries.SMEM),
        ),
        ROLES,
    )


def smem_map(cfg: SparseBackwardConfig, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("Q", cfg.q_tile.nbytes, align=1024),
        Region("dO", cfg.do_tile.nbytes, align=1024),
        Region("K", STAGES * cfg.k_tile.nbytes, align=1024),
        Region("V", STAGES * cfg.v_tile.nbytes, align=1024),
        Region("P", cfg.p_tile.nbytes, align=1024),
        Region("dS", cfg.p_tile.nbytes, align=1024),
        Region("dV", TILE_N * cfg.sum_row_bytes(cfg.head_dim_v), align=128),
        Region("dK", TILE_N * cfg.sum_row_bytes(cfg.head_dim), align=128),
        Region("start", 8),
        Region("barriers", table.nbytes, align=8),
    )


KERNEL = SparseBackwardKernel("sm90.sparse_backward", channels, smem_map, Sm90SparseContext)
