"""Scratch memory of the backward, on the host. The statistics kernel writes all of it first."""

from __future__ import annotations

from typing import NamedTuple

import torch
from cutlass import Float32, Int32
from torch import Tensor

from .. import jit
from ..core.rows import row_blocks
from ..memory import empty
from ..mods.record import Mods
from ..spec import AttentionInputs, AttentionSpec
from .blocks import RowBlocks


class Workspace(NamedTuple):
    """statistics (heads, blocks, 2, tile_m), dq_sum (heads, blocks, elements) and dsink, like lse, are float32; turns
    (heads, blocks * turns) and ranks (heads, blocks, blocks of keys of a block mask) are int32. `heads` are query
    heads, or groups of packed ones; see `blocks` and `ranks`.

    dsink holds the terms of a sum over each head's rows, 0 for rows that no sequence has.
    """

    statistics: Tensor
    dq_sum: Tensor
    turns: Tensor | None
    ranks: Tensor | None
    dsink: Tensor | None

    @staticmethod
    def allocate(inputs: AttentionInputs, spec: AttentionSpec, cfg: RowBlocks, mods: Mods | None = None) -> Workspace:
        heads, device = spec.heads_q // cfg.packed, inputs.q.device
        rows = inputs.q.shape[0] if inputs.varlen else inputs.q.shape[1]
        blocks = row_blocks(rows, inputs.batch, cfg.tile_m, cfg.packed, cfg.varlen)
        of_rows = (spec.heads_q, rows) if inputs.varlen else (inputs.batch, spec.heads_q, rows)
        return Workspace(
            empty((heads, blocks, 2, cfg.tile_m), torch.float32, device),
            empty((heads, blocks, cfg.placement.elements), torch.float32, device),
            empty((heads, blocks * cfg.turns), torch.int32, device) if cfg.turns else None,
            empty((heads, blocks, mods.key_blocks), torch.int32, device) if mods and cfg.list_rows else None,
            torch.zeros(of_rows, dtype=torch.float32, device=device) if cfg.has_sink else None,
        )

    @staticmethod
    def fake(cfg: RowBlocks) -> Workspace:
        """Stand-ins for compilation."""
        return Workspace(
            jit.fake_tensor(Float32, 4, contiguous=True),
            jit.fake_tensor(Float32, 3, contiguous=True),
            jit.fake_tensor(Int32, 2, contiguous=True) if cfg.turns else None,
            jit.fake_tensor(Int32, 3, contiguous=True, align=4) if cfg.list_rows else None,
            jit.fake_tensor(Float32, 2 if cfg.varlen else 3, contiguous=True, align=4) if cfg.has_sink else None,
        )

    def dsink_terms(self) -> Tensor | None:
        """(heads_q, ...)."""
        return self.dsink if self.dsink is None or self.dsink.ndim == 2 else self.dsink.transpose(0, 1)
