"""The Blackwell forward: the page to read first. Who does what, who hands what to whom, and where things lie.

A CTA owns two Q tiles of 128 rows and walks the key blocks from last to first. While one tile's S is in softmax the
other tile's products run: per key block and Q tile, S = Q K^T goes to tensor memory, a softmax warpgroup (one thread
a row) reads it and writes P = exp2(S - max) over it in 16 bits, O += P V accumulates in tensor memory. When a row's
maximum has grown, the correction warpgroup scales O before the next product; at the end it normalises O.

Two CTAs may work as a pair (`cfg.ctas`, see `config`): their Q tiles side by side, one of them issuing for both. Of
(192, 128) correction stores a pair's O by itself, because Q and staged O would leave K and V two stages.

Where queries are few, memory is what takes time. Then a CTA owns one Q tile, a query's heads being neighbouring rows,
and part of the keys; its K/V ring holds all the memory that is left, two CTAs share a multiprocessor, and correction
stores O by itself. So it is with keys of 8-bit numbers, however many queries there are: a warpgroup makes of the
bytes that are loaded the tiles that products read. And so it is with rows that TMA does not bring, which a warpgroup
copies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...fwd.launch import Arguments, ForwardKernel
from ...pipeline import kernel as kernels
from ...pipeline.channels import (
    Across,
    By,
    Carries,
    Channel,
    ChannelTable,
    Every,
    Implied,
)
from ...pipeline.roles import Role, RoleTable
from ...pipeline.smem import Region, SmemMap
from .. import tmem
from ..signals import SIGNALS
from .config import Config, Schedule
from .convert import convert
from .correction import correction
from .epilogue import epilogue
from .gather import gather
from .load import load
from .mma import mma
from .schedule import schedule
from .softmax import softmax

SOFTMAX_REGS = {1: 192, 2: 120}  # a thread's, by how many CTAs share a multiprocessor
CORRECTION_REGS = {1: 72, 2: 64}
HELPER_REGS = 80  # of those that convert or gather


def roles(cfg: Config) -> RoleTable:
    """A softmax warpgroup for each Q tile, and two for the rest; one more converts, one gathers, if asked to."""
    first = 4 * cfg.q_tiles
    correcting = Role("correction", warps=(first, first + 4), regs=CORRECTION_REGS[cfg.per_sm], body=correction)
    warpgroups = [correcting]
    for name, body, is_there in (("convert", convert, cfg.has_bytes), ("gather", gather, cfg.plain_keys)):
        if is_there:
            end = warpgroups[-1].warps[1]
            warpgroups.append(Role(name, warps=(end, end + 4), regs=HELPER_REGS, body=body))
    single = [("mma", mma), ("load", load), ("epilogue", epilogue), ("schedule", schedule)]
    if cfg.directly:
        single.remove(("epilogue", epilogue))
    after = warpgroups[-1].warps[1]
    singles = (
        Role(name, warps=(warp, warp + 1), regs=56, body=body) for warp, (name, body) in enumerate(single, after)
    )
    return RoleTable(
        (
            Role("softmax", warps=(0, first), regs=SOFTMAX_REGS[cfg.per_sm], body=softmax, instances=cfg.q_tiles),
            *warpgroups,
            *singles,
        ),
        cfg.per_sm,
    )


def tmem_map(cfg: Config) -> tmem.TmemMap:
    """One S and one O per Q tile; P lies over the second half of each S."""
    s_columns, half = cfg.q_tiles * cfg.tile_n, cfg.tile_n // 2
    return tmem.TmemMap(
        S=tmem.cols(0, s_columns),
        P=tmem.alias_of("S", columns=s_columns - half, offset=half),
        O=tmem.cols(s_columns, cfg.q_tiles * cfg.o_columns),
    )


NEXT_S = Implied("mma_softmax_S")
FREE_S = Implied("mma_softmax_S", "free")


def channels(cfg: Config) -> ChannelTable:
    """<producer>_<consumer>_<payload>; a stage per Q tile, except K/V's ring. What mma takes part in, a pair shares."""
    across = Across.PAIR if cfg.ctas == 2 else Across.NOTHING

    def shared(name, producer, consumer, filled, freed, stages, carries) -> Channel:
        return Channel(name, producer, consumer, filled, freed, stages, carries, cfg.ctas, across)

    if cfg.o_over_q:  # a Q tile's place is free when the O staged there has been stored
        q = Channel("load_mma_Q", "load", "mma", By.TMA, By.WARP, cfg.q_tiles, Carries.ASYNC_SMEM, freer="epilogue")
    else:
        q = shared("load_mma_Q", "load", "mma", By.TMA, By.UMMA, cfg.q_tiles, Carries.ASYNC_SMEM)
    bringer, brought = ("gather", By.WARP) if cfg.plain_keys else ("load", By.TMA)
    if cfg.has_bytes:
        raw = f"{bringer}_convert_KV", bringer, "convert", brought, By.WARP, cfg.byte_stages
        wide = "convert_mma_KV", "convert", "mma", By.WARP, By.UMMA, cfg.kv_stages
        kv = tuple(Channel(*row, Carries.ASYNC_SMEM) for row in (raw, wide))
    else:
        kv = (shared(f"{bringer}_mma_KV", bringer, "mma", brought, By.UMMA, cfg.kv_stages, Carries.ASYNC_SMEM),)
    rows = (
        q,
        *kv,
        # Free again = P's head is written over S, and O is ready to be added to. The next S needs no wait of
        # its own: the matrix unit works in order, and the product before it waited for this.
        shared("mma_softmax_S", "mma", ("softmax", "correction"), By.UMMA, By.WARP, cfg.q_tiles, Carries.TMEM),
        # The next S comes after the product that reads P.
        shared("softmax_mma_Ptail", "softmax", "mma", By.WARP, NEXT_S, cfg.q_tiles, Carries.TMEM),
        Channel("softmax_correction_scale", "softmax", "correction", By.WARP, By.WARP, cfg.q_tiles, Carries.SMEM),
        Channel("softmax_correction_norm", "softmax", "correction", By.WARP, By.WARP, cfg.q_tiles, Carries.SMEM),
        # Correction has read O when it frees the next work tile's first S.
        shared("mma_correction_O", "mma", "correction", By.UMMA, FREE_S, cfg.q_tiles, Carries.TMEM),
    )
    storing = ("correction",) if cfg.directly else ("correction", "epilogue")
    if not cfg.directly:
        rows += (Channel("correction_epilogue_O", *storing, By.WARP, By.READ, cfg.q_tiles, Carries.ASYNC_SMEM),)
    if cfg.schedule is Schedule.DYNAMIC:
        readers = (Every("softmax"), *storing, "mma", "load", "schedule")
        rows += (Channel("schedule_all_index", "schedule", readers, By.TMA, By.WARP, 1, Carries.ASYNC_SMEM),)
    return ChannelTable(rows, roles(cfg), SIGNALS)


def smem_map(cfg: Config, table: ChannelTable) -> SmemMap:
    out_bytes = (cfg.q_tiles - 1) * cfg.o_step + cfg.o_tile.nbytes
    out = Region("O", out_bytes, align=1024, over="Q" if cfg.o_over_q else None)
    return SmemMap(
        Region("Q", cfg.q_tiles * cfg.q_tile.nbytes, align=1024),
        Region("KV", cfg.kv_stages * cfg.kv_stage_bytes, align=1024),
        *((Region("KV bytes", cfg.byte_stages * cfg.byte_stage_bytes, align=1024),) if cfg.has_bytes else ()),
        *(() if cfg.directly else (out,)),
        Region("scale", cfg.rows_bytes),
        Region("norm", cfg.rows_bytes),
        Region("barriers", table.nbytes, align=8),
        Region("tmem", 4),
        Region("index", 16),
    )


@dataclass(frozen=True, slots=True)
class Context(kernels.Context):
    """What a role's body gets."""

    tmem: tmem.TmemMap | tmem.PlacedMap | None = None

    def placed(self) -> Context:
        """The same with tensor memory's spans where they lie in this CTA."""
        return replace(self, tmem=self.resources.place(self.tmem, self.smem))


def context(args: Arguments, cfg: Config, table: ChannelTable, smem: SmemMap) -> Context:
    memory = tmem.TensorMemory(table.roles["correction"].warps[0], cfg.ctas, cfg.per_sm)  # any warp would do
    return Context(args, cfg, table, smem, memory, cfg.ctas, tmem_map(cfg))


KERNEL = ForwardKernel("sm100.forward", channels, smem_map, context, clusters=True, is_cutlass=False)
