"""Scratch memory of the backward, allocated by the host. The statistics kernel initialises it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.rows import row_blocks
from ..mods.ir.record import Mods
from ..runtime import jit
from ..runtime.dsl import cutlass
from ..runtime.memory import maker
from ..runtime.spec import AttentionInputs
from .blocks import KEYS, RowBlocks


class Workspace(NamedTuple):
    """Scratch tensors, see `blocks` and `ranks`; `heads` are query heads, or groups of packed heads.

    float32: statistics (heads, blocks, 2, tile_m), dq_sum (heads, blocks, elements), dsink like lse.
    int32: semaphores (heads, blocks * semaphores), ranks (heads, blocks, key blocks of the block mask).
    If `chained`, dq_sum and semaphores have a leading axis of chains. dsink holds the terms of a sum over the rows of
    each head, 0 in padding rows. key_sums: float32 (parts, batch, heads_kv, key blocks, elements), see
    `kernels.key_sums`.
    """

    statistics: Tensor
    dq_sum: Tensor | None
    semaphores: Tensor | None
    ranks: Tensor | None
    dsink: Tensor | None
    key_sums: Tensor | None

    @staticmethod
    def fake(cfg: RowBlocks) -> Workspace:
        """Fake tensors for compilation."""
        return Workspace(
            jit.fake_tensor(cutlass.Float32, 4, contiguous=True),
            jit.fake_tensor(cutlass.Float32, 3 + cfg.chained, contiguous=True) if cfg.placement is not None else None,
            jit.fake_tensor(cutlass.Int32, 2 + cfg.chained, contiguous=True) if cfg.semaphores else None,
            jit.fake_tensor(cutlass.Int32, 3, contiguous=True, align=4) if cfg.list_rows else None,
            jit.fake_tensor(cutlass.Float32, 2 if cfg.varlen else 3, contiguous=True, align=4)
            if cfg.has_sink
            else None,
            jit.fake_tensor(cutlass.Float32, 5, contiguous=True) if cfg.key_sums else None,
        )

    def dsink_terms(self) -> Tensor | None:
        """Terms of dsink as (heads_q, ...)."""
        return self.dsink if self.dsink is None or self.dsink.ndim == 2 else self.dsink.transpose(0, 1)


class Allocator:
    """Allocator of workspaces for one kind of problem; it computes the sizes once per shape of q and k. chains: sums
    per block, if `chained`. parts: CTAs that share a key block, if `key_columns`."""

    def __init__(self, cfg: RowBlocks, chains: int = 1, parts: int = 1) -> None:
        self._cfg, self._chains, self._parts = cfg, (chains,) if cfg.chained else (), parts
        self._maker = functools.lru_cache(maxsize=256)(self._maker_for)

    def __call__(self, inputs: AttentionInputs, mods: Mods | None = None) -> Workspace:
        key_blocks = mods.key_blocks if mods is not None and self._cfg.list_rows else 0
        return self._maker(inputs.q.shape, inputs.k.shape, inputs.batch, inputs.q.device, key_blocks)()

    def _maker_for(
        self, shape_q: torch.Size, shape_k: torch.Size, batch: int, device: torch.device, key_blocks: int
    ) -> Callable[[], Workspace]:
        cfg, (*_, rows, all_heads, _) = self._cfg, shape_q
        heads, blocks = all_heads // cfg.packed, row_blocks(rows, batch, cfg.tile_m, cfg.packed, cfg.varlen)
        row_shape = (all_heads, rows) if cfg.varlen else (batch, all_heads, rows)
        statistics = maker((heads, blocks, 2, cfg.tile_m), torch.float32, device)
        dq_sum: Callable[[], Tensor | None] = _nothing
        if cfg.placement is not None:
            dq_sum = maker((*self._chains, heads, blocks, cfg.placement.elements), torch.float32, device)
        semaphores = (
            maker((*self._chains, heads, blocks * cfg.semaphores), torch.int32, device) if cfg.semaphores else _nothing
        )
        ranks = maker((heads, blocks, key_blocks), torch.int32, device) if cfg.list_rows else _nothing
        zeros = functools.partial(torch.zeros, row_shape, dtype=torch.float32, device=device)
        dsink = zeros if cfg.has_sink else _nothing
        key_sums: Callable[[], Tensor | None] = _nothing
        if cfg.key_sums:
            *_, keys, heads_kv, _ = shape_k
            shape = self._parts, batch, heads_kv, -(-keys // KEYS), cfg.key_sums
            key_sums = maker(shape, torch.float32, device)
        return lambda: Workspace(statistics(), dq_sum(), semaphores(), ranks(), dsink(), key_sums())


def _nothing() -> None: ...
