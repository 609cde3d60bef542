"""The Hopper backward: the page to read first. Who does what, who hands what to whom, and where things lie.

A CTA owns a block of 128 keys and walks the query blocks that see it, for each query head of the group in turn, so
that dK and dV grow in registers and are written once. Two warpgroups have 64 keys each. Per step, on transposed scores:
S^T = K Q^T and dP^T = V dO^T; P^T and dS^T stay in registers as left operands of dV += P^T dO and dK += dS^T Q; dS goes
to shared memory too, for dQ = dS K, which leaves through shared memory as an addition to a float32 sum. Two small
kernels go around it: row statistics before, the sums' conversion to dQ after. The main kernel and the
last one are launched while the one before still runs, and wait for it where they need its results.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...bwd.launch import BackwardKernel
from ...pipeline import kernel as kernels
from ...pipeline.channels import ONCE, By, Carries, Channel, ChannelTable, Every
from ...pipeline.roles import Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from .compute import compute
from .config import CONSUMERS, REDUCERS, Config, Division
from .load import load
from .reduce import reduce

ROLES = RoleTable(
    (
        Role("compute", warps=(0, 8), regs=240, body=compute, instances=CONSUMERS),
        Role("load", warps=(8, 9), regs=24, body=load),
        Role("reduce", warps=(9, 12), regs=24, body=reduce, instances=REDUCERS),
    )
)


def channels(cfg: Config) -> ChannelTable:
    """<producer>_<consumer>_<payload>. Both warpgroups of compute take part in every stage but those of dQ, which are
    each warpgroup's own; see `handing`."""
    both, memory = Every("compute"), Carries.ASYNC_SMEM
    dq_stages = cfg.reducers * cfg.dq_consumers
    of_ds = "compute" if cfg.division is Division.NONE else both
    return ChannelTable(
        (
            Channel("load_compute_K", "load", both, By.TMA, ONCE, 1, memory),
            Channel("load_compute_V", "load", both, By.TMA, ONCE, 1, memory),
            # Q comes with its rows' statistics, which have been read when the products that follow are done.
            Channel("load_compute_Q", "load", both, By.TMA, By.WGMMA, cfg.q_stages, memory),
            Channel("load_compute_dO", "load", both, By.TMA, By.WGMMA, cfg.stages, memory),
            Channel("compute_compute_dS", both, of_ds, By.WARP, By.WGMMA, cfg.ds_stages, memory),
            # The adding warp has time for the fence between threads' stores and its copies; see `reduce`.
            Channel("compute_reduce_dQ", "compute", "reduce", By.WARP, By.READ, dq_stages, Carries.SMEM),
        ),
        ROLES,
    )


def smem_map(cfg: Config, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("K", cfg.k_tile.nbytes, align=1024),
        Region("V", cfg.v_tile.nbytes, align=1024),
        Region("Q", cfg.q_stages * cfg.q_tile.nbytes, align=1024),
        Region("dO", cfg.stages * cfg.do_tile.nbytes, align=1024),
        Region("dS", cfg.ds_stages * cfg.ds_tile.nbytes, align=1024),
        Region("dQ", cfg.dq_consumers * cfg.dq_bytes, align=128),
        Region("rows", cfg.q_stages * cfg.rows_bytes, align=128),
        Region("barriers", table.nbytes, align=8),
    )


@dataclass(frozen=True, slots=True)
class Context(kernels.Context):
    """What a role's body gets."""

    first_reduce_warp: int = ROLES["reduce"].warps[0]
    last_dq: int = 1  # named barriers; 0 is the CTA's
    gradients_staged: int = 2  # and 3: one for each warpgroup of compute


KERNEL = BackwardKernel("sm90.backward", channels, smem_map, Context, overlap=kernels.Overlap.ROLES)
