"""Scratch memory of the backward: per-row statistics and the float32 sum of dq, in tile-aligned rows.

Rows are those of `core.heads`: the `group` query heads of a key/value head, packed. Each sequence starts at a multiple
of tile_m, so that tiles never straddle sequences and need no bounds checks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory import empty
from ..spec import AttentionInputs, AttentionSpec


def padded_rows(inputs: AttentionInputs, spec: AttentionSpec, tile_m: int) -> int:
    """Rows of a key/value head over all sequences, each sequence padded to tiles; see `core.seqlen.padded_first`."""
    if inputs.varlen:
        return inputs.q.shape[0] * spec.group // tile_m * tile_m + inputs.batch * tile_m + tile_m
    return inputs.batch * (-(-inputs.max_seqlen_q * spec.group // tile_m) * tile_m)


@dataclass(frozen=True, slots=True)
class Workspace:
    """lse_log2 and delta: (heads_kv, rows). dq: (heads_kv, rows, padded head dim). turn: (heads_kv, row tiles) int32,
    whose turn it is to add to a tile of dq. All are written by the preprocess kernel first."""

    lse_log2: Tensor
    delta: Tensor
    dq: Tensor
    turn: Tensor | None

    @staticmethod
    def allocate(inputs: AttentionInputs, spec: AttentionSpec, tile_m: int, padded_head_dim: int) -> Workspace:
        rows, heads, device = padded_rows(inputs, spec, tile_m), spec.heads_kv, inputs.q.device
        return Workspace(
            empty((heads, rows), torch.float32, device),
            empty((heads, rows), torch.float32, device),
            empty((heads, rows, padded_head_dim), torch.float32, device),
            empty((heads, rows // tile_m), torch.int32, device) if spec.deterministic else None,
        )
