"""Hopper kernel of the indexer's scores: roles, channels and shared-memory map. Read this file first.

A CTA has a few rows with all their heads, which stay in shared memory, and streams keys past them. Keys are the rows of
the products, (row, head) pairs the columns, so that threads add up most heads in registers. The consumers have
different rows for the same key blocks: each block from L2 meets `rows * heads` queries. A consumer adds up the scores
of a product while the tensor cores compute those of the other three.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8

from ...core.arguments import fake_numbers
from ...fwd.consumers import consumer_roles
from ...pipeline.channels import ONCE, By, Carries, Channel, ChannelTable, Every
from ...pipeline.kernel import RoleKernel
from ...pipeline.roles import RoleTable
from ...pipeline.smem import Region, SmemMap
from ...pipeline.tma import TmaTile
from ...runtime import jit
from .compute import compute
from .config import ScoresConfig
from .context import Maps, Range, ScoresArguments, ScoresContext, ScoresTensors
from .load import load


def roles(cfg: ScoresConfig) -> RoleTable:
    return consumer_roles(cfg, compute, load)


def channels(cfg: ScoresConfig) -> ChannelTable:
    """Channels, named <producer>_<consumer>_<payload>. Q has a stage per consumer; all consumers read one K ring."""
    memory = Carries.ASYNC_SMEM
    queries = Channel("load_compute_Q", "load", "compute", By.TMA, ONCE, cfg.consumers, memory)
    keys = Channel("load_compute_K", "load", Every("compute"), By.TMA, By.WGMMA, cfg.stages, memory)
    return ChannelTable((queries, keys), roles(cfg))


def smem_map(cfg: ScoresConfig, table: ChannelTable) -> SmemMap:
    return SmemMap(
        Region("Q", cfg.q_bytes, align=1024),
        Region("K", cfg.stages * cfg.k_tile.nbytes, align=1024),
        Region("barriers", table.nbytes, align=8),
    )


class ScoresKernel(RoleKernel):
    """Program of the kernel."""

    __slots__ = ()

    @cute.jit
    def launch(self, tensors: ScoresTensors, numbers: Range, cfg: cutlass.Constexpr, stream):
        tensors, numbers = ScoresTensors(*tensors), Range(*numbers)
        maps = Maps(*(TmaTile.load(x, tile).map for x, tile in ((tensors.q, cfg.q_tile), (tensors.k, cfg.k_tile))))
        self.start(ScoresArguments(maps, tensors, numbers), cfg, numbers.tiles * numbers.splits, stream)

    def fake_args(self, cfg: Any) -> tuple:
        bits = Uint8 if cfg.dtype.width == 8 else cfg.dtype
        vector = jit.fake_tensor(Int32, 1, align=4)
        tensors = ScoresTensors(
            q=jit.fake_tensor(bits, 2),
            k=jit.fake_tensor(bits, 2),
            weights=jit.fake_tensor(Float32, 2, contiguous=True),
            scores=jit.fake_tensor(Float32, 2),
            k_descale=jit.fake_tensor(Float32, 1, align=4) if cfg.has_k_descale else None,
            q_begin=vector,
            k_begin=jit.fake_tensor(Int32, 1, align=4),
            counts=jit.fake_tensor(Int32, 1, align=4),
            sequences=jit.fake_tensor(Int32, 1, align=4),
            page_table=jit.fake_tensor(Int32, 2, align=4) if cfg.page_size else None,
        )
        return tensors, fake_numbers(Range)


def context(args: ScoresArguments, cfg: ScoresConfig, table: ChannelTable, smem: SmemMap) -> ScoresContext:
    return ScoresContext(args, cfg, table, smem)


KERNEL = ScoresKernel("sm90.indexer", channels, smem_map, context)
