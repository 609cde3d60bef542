"""Hopper backward kernel: roles, channels and shared-memory map. Read this file first.

A CTA owns a block of 128 keys and iterates over the query blocks that see it, for each query head of the group. dK and
dV accumulate in registers and are stored once. Two consumer warpgroups have 64 keys each. A step works on transposed
scores: S^T = K Q^T and dP^T = V dO^T. P^T and dS^T stay in registers as left operands of dV += P^T dO and dK += dS^T Q.
dS is also stored to shared memory for dQ = dS K. dQ leaves through shared memory and is added to a float32 sum.

Two small kernels surround the main kernel: row statistics before, conversion of the sums to dQ after (unless the last
key block stores dq, see `last_dq`). The main kernel
and the last one start while the kernel before still runs (PDL), and wait where they need its results.
"""

from __future__ import annotations

from ...bwd.launch import BackwardKernel
from ...pipeline import kernel as kernels
from ...pipeline.channels import ONCE, By, Carries, Channel, ChannelTable, Every, Implied
from ...pipeline.roles import Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from .common.config import CONSUMERS
from .common.load import load
from .compute import compute
from .config import REDUCERS, Division, Sm90BackwardConfig
from .context import Sm90BackwardContext
from .reduce import reduce

ROLES = RoleTable(
    (
        Role("compute", warps=(0, 8), regs=240, body=compute, instances=CONSUMERS),
        Role("load", warps=(8, 9), regs=24, body=load),
        Role("reduce", warps=(9, 12), regs=24, body=reduce, instances=REDUCERS),
    )
)


def channels(cfg: Sm90BackwardConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>. Both consumers take part in every stage, except in the stages of
    dQ: each of these belongs to one consumer, see `dq_cursor`."""
    both, memory = Every("compute"), Carries.ASYNC_SMEM
    dq_stages = cfg.reducers * cfg.dq_consumers
    ds_consumers = "compute" if cfg.division is Division.NONE else both
    sums: tuple[Channel, ...] = ()
    if cfg.last_finishes:
        # One buffer, and a barrier for each reduce warp. A consumer has read the sum when it stages dQ.
        is_read = Implied("compute_reduce_dQ")
        sums = (Channel("reduce_compute_sum", "reduce", both, By.TMA, is_read, cfg.reducers, Carries.SMEM),)
    return ChannelTable(
        (
            Channel("load_compute_K", "load", both, By.TMA, ONCE, 1, memory),
            Channel("load_compute_V", "load", both, By.TMA, ONCE, 1, memory),
            # Q comes with the row statistics; these have been read when the products that use Q are done.
            Channel("load_compute_Q", "load", both, By.TMA, By.WGMMA, cfg.q_stages, memory),
            Channel("load_compute_dO", "load", both, By.TMA, By.WGMMA, cfg.stages, memory),
            Channel("compute_compute_dS", both, ds_consumers, By.WARP, By.WGMMA, cfg.ds_stages, memory),
            # The reduce warp issues the fence between the threads' stores and its bulk copies; see `reduce`.
            Channel("compute_reduce_dQ", "compute", "reduce", By.WARP, By.READ, dq_stages, Carries.SMEM),
            *sums,
        ),
        ROLES,
    )


def smem_map(cfg: Sm90BackwardConfig, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("K", cfg.k_tile.nbytes, align=1024),
        Region("V", cfg.v_tile.nbytes, align=1024),
        Region("Q", cfg.q_stages * cfg.q_tile.nbytes, align=1024),
        Region("dO", cfg.stages * cfg.do_tile.nbytes, align=1024),
        Region("dS", cfg.ds_stages * cfg.ds_tile.nbytes, align=1024),
        Region("dQ", cfg.dq_consumers * cfg.dq_bytes, align=128 if cfg.dq_tile is None else 1024),
        *([Region("sum", cfg.sum_bytes, align=128)] if cfg.last_finishes else []),
        Region("rows", cfg.q_stages * cfg.rows_bytes, align=128),
        Region("barriers", table.nbytes, align=8),
    )


KERNEL = BackwardKernel("sm90.backward", channels, smem_map, Sm90BackwardContext, overlap=kernels.Overlap.ROLES)
