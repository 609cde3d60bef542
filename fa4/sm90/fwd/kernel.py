"""The Hopper forward: the page to read first. Who does what, who hands what to whom, and where things lie.

A CTA owns a tile of query rows, 64 for each warpgroup that computes, and walks the key blocks from last to first. Each
of these teams does all of its rows' work: S = Q K^T, softmax in the registers where S arrives, O += P V with P from
registers. They take turns on the matrix unit, so that the softmax of one meets the products of the others. One warp of
another warpgroup loads, a work tile ahead. Two CTAs may share a tile of twice the rows and load its keys together: each
half of every block, into the shared memory of both. Where K and V are 8-bit numbers, one more warpgroup makes of them
the tiles that products read, of bytes that it is brought or loads itself. Rows that TMA does not bring are copied by a
warpgroup, too.
"""

from __future__ import annotations

from ...fwd.launch import Arguments, ForwardKernel
from ...pipeline import kernel as kernels
from ...pipeline.channels import Across, By, Carries, Channel, ChannelTable, Every
from ...pipeline.roles import WARPS_PER_WARPGROUP, Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from .compute import compute
from .config import Config
from .convert import convert
from .gather import gather
from .load import load


def roles(cfg: Config) -> RoleTable:
    end = cfg.consumers * WARPS_PER_WARPGROUP
    compute_regs, load_regs, helper_regs = cfg.regs
    table = [Role("compute", warps=(0, end), regs=compute_regs, body=compute, instances=cfg.consumers)]
    for name, body, is_there in (("convert", convert, cfg.has_bytes), ("gather", gather, cfg.gathers)):
        if is_there:
            table.append(Role(name, warps=(end, end + WARPS_PER_WARPGROUP), regs=helper_regs, body=body))
            end += WARPS_PER_WARPGROUP
    return RoleTable((*table, Role("load", warps=(end, end + 1), regs=load_regs, body=load)))


def channels(cfg: Config) -> ChannelTable:
    """<producer>_<consumer>_<payload>; a stage of Q per team and buffer, rings of K and V that all teams read, and of
    bytes, if they come as such."""
    bringer, brought = ("gather", By.WARP) if cfg.gathers else ("load", By.TMA)
    memory, consumers = Carries.ASYNC_SMEM, Every("compute")
    # By the loads into registers or the stores of the O staged there, or by the products.
    q_freed = By.WARP if cfg.holds_q or cfg.o_over_q else By.WGMMA
    queries = Channel("load_compute_Q", "load", "compute", By.TMA, q_freed, cfg.q_buffers * cfg.consumers, memory)
    shared = (cfg.ctas, Across.MULTICAST) if cfg.ctas > 1 else ()
    keys: list[Channel] = []
    for x in ("K", "V"):
        if cfg.has_bytes:
            if not cfg.fetches:
                raw = f"{bringer}_convert_{x}", bringer, "convert", brought, By.WARP, cfg.byte_stages
                keys.append(Channel(*raw, memory))
            keys.append(Channel(f"convert_compute_{x}", "convert", consumers, By.WARP, By.WGMMA, cfg.stages, memory))
        else:
            of_keys = f"{bringer}_compute_{x}", bringer, consumers, brought, By.WGMMA, cfg.stages, memory
            keys.append(Channel(*of_keys, *shared))
    return ChannelTable((queries, *keys), roles(cfg))


def smem_map(cfg: Config, table: ChannelTable) -> SmemMap:
    out = Region("O", (cfg.consumers - 1) * cfg.o_step + cfg.o_bytes, align=1024, over="Q" if cfg.o_over_q else None)
    bytes_of_keys = (
        (
            Region("K bytes", cfg.byte_stages * cfg.k_tile.nbytes, align=1024),
            Region("V bytes", cfg.byte_stages * cfg.v_tile.nbytes, align=1024),
        )
        if cfg.byte_stages
        else ()
    )
    return SmemMap(
        Region("Q", cfg.q_buffers * cfg.consumers * cfg.q_step, align=1024),
        Region("K", cfg.stages * cfg.k_operand.nbytes, align=1024),
        Region("V", cfg.stages * cfg.v_operand.nbytes, align=1024),
        *bytes_of_keys,
        *(() if cfg.directly else (out,)),
        Region("barriers", table.nbytes, align=8),
    )


def context(args: Arguments, cfg: Config, table: ChannelTable, smem: SmemMap) -> kernels.Context:
    return kernels.Context(args, cfg, table, smem, cluster=cfg.ctas)


KERNEL = ForwardKernel("sm90.forward", channels, smem_map, context)
