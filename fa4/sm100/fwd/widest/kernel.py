"""The Blackwell forward of head dims above 256: roles, channels and memory. Read this file first.

O of 128 rows and 512 columns would fill tensor memory. So a product of a CTA pair has 128 rows, 64 of each CTA; in this
form lanes 0 to 63 of a CTA have the first half of the columns of its rows, lanes 64 to 127 the second. O takes half of
tensor memory, and two S have room beside it. The matrix unit works at its full rate.

The next S is computed during the softmax of this one. P goes through shared memory, since tensor memory would need it
in both halves of the lanes. The softmax warps also rescale O and store it: the time of S hides that.

K and V come in stages of equal size, as products read them: a part of the columns of K, or some keys and columns of V.
8-bit rows become float16 stages on the way into shared memory; Q becomes float16, too.
"""

from __future__ import annotations

from ....fwd.launch import ForwardKernel, ForwardKernelArguments
from ....pipeline.channels import ONCE, By, Carries, Channel, ChannelTable, ClusterSharing, Implied
from ....pipeline.roles import Role, RoleTable
from ....pipeline.smem import Region, SmemMap
from ... import tmem
from ...signals import SIGNALS
from ...stages import PAIR, STAGE_BYTES
from ...tensor_memory import LANES
from .config import S_STAGES, WidestConfig
from .context import WidestContext
from .convert import convert
from .load import load
from .mma import mma
from .softmax import softmax


def roles(cfg: WidestConfig) -> RoleTable:
    """Roles; a warpgroup converts 8-bit rows."""
    warpgroups = [Role("softmax", warps=(0, 4), regs=240, body=softmax)]
    if cfg.converts_kv:
        warpgroups.append(Role("convert", warps=(4, 8), regs=208, body=convert))
    first, regs = warpgroups[-1].warps[1], 56 if cfg.converts_kv else 80
    mma_role = Role("mma", warps=(first, first + 1), regs=regs, body=mma)
    return RoleTable((*warpgroups, mma_role, Role("load", warps=(first + 1, first + 2), regs=regs, body=load)))


def tmem_map(cfg: WidestConfig) -> tmem.TmemMap:
    """TMEM map: two S and O, of 64 rows in 128 lanes."""
    return tmem.TmemMap(S=tmem.cols(0, S_STAGES * cfg.keys), O=tmem.cols(S_STAGES * cfg.keys, cfg.o_columns))


def channels(cfg: WidestConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>, of both CTAs together."""

    def shared(name, producer, consumer, filled, freed, stages, carries) -> Channel:
        return Channel(name, producer, consumer, filled, freed, stages, carries, PAIR, ClusterSharing.PAIR)

    smem, both = Carries.ASYNC_SMEM, Carries.ASYNC_SMEM | Carries.TMEM
    loader, filled = ("convert", By.WARP) if cfg.converts_kv else ("load", By.TMA)
    # Implied: a P is full when softmax has read its S, and S of the block after next follows the product with it.
    q: tuple[Channel, ...] = (shared("load_mma_Q", "load", "mma", By.TMA, ONCE, 1, smem),)
    if cfg.scales_q:
        q = (
            Channel("load_softmax_Q", "load", "softmax", By.TMA, ONCE, 1, smem),
            shared("softmax_mma_Q", "softmax", "mma", By.WARP, ONCE, 1, smem),
        )
    rows = (
        *q,
        shared(f"{loader}_mma_KV", loader, "mma", filled, By.UMMA, cfg.kv_stages, smem),
        shared("mma_softmax_S", "mma", "softmax", By.UMMA, Implied("softmax_mma_P"), S_STAGES, Carries.TMEM),
        # Full means also: O is rescaled. Free means also: O has the product with this P.
        shared("softmax_mma_P", "softmax", "mma", By.WARP, By.UMMA, 1, both),
    )
    return ChannelTable(rows, roles(cfg), SIGNALS)


def smem_map(cfg: WidestConfig, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("Q", cfg.q_tile.nbytes, align=1024),
        Region("KV", cfg.kv_stages * STAGE_BYTES, align=1024),
        Region("P", cfg.p_tile.nbytes, align=1024),
        Region("halves", (S_STAGES + 1) * 4 * LANES),
        Region("barriers", table.nbytes, align=8),
        Region("tmem", 4),
    )


def context(args: ForwardKernelArguments, cfg: WidestConfig, table: ChannelTable, smem: SmemMap) -> WidestContext:
    memory = tmem.TensorMemory(table.roles["mma"].warps[0], PAIR)
    return WidestContext(args, cfg, table, smem, memory, PAIR, tmem_map(cfg))


KERNEL = ForwardKernel("sm100.fwd.widest", channels, smem_map, context, clusters=True, is_cutlass=False)
