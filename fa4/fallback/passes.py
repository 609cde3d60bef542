"""Passes: sequences and heads that the tile loops process together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..runtime.sequences import cached_rows, sequences
from ..runtime.spec import AttentionInputs, AttentionSpec, Cache, compute_dtype
from . import tiles


@dataclass(frozen=True, slots=True)
class Pass:
    """Sequences (all of one length) and key/value heads of one pass of the tile loops."""

    spec: AttentionSpec
    packed: bool
    batch: slice
    heads: slice
    q_rows: slice
    k_rows: slice
    first_sequence: int  # index of the first sequence of the pass; with varlen, of its only sequence
    cache: Cache | None = None  # if k and v are a cache; then the pass has one sequence

    @property
    def seqlen_q(self) -> int:
        return self.q_rows.stop - self.q_rows.start

    @property
    def seqlen_k(self) -> int:
        return self.k_rows.stop - self.k_rows.start

    def q_view(self, x: Tensor) -> Tensor:
        """View of a tensor like q: (batch, rows, heads_kv, group, dim)."""
        part = x[None, self.q_rows] if self.packed else x[self.batch, self.q_rows]
        return part.unflatten(2, (self.spec.heads_kv, self.spec.group))[:, :, self.heads]

    def k_view(self, x: Tensor) -> Tensor:
        """View of a tensor like k: (batch, rows, heads_kv, dim)."""
        if self.cache is not None:
            return cached_rows(x, self.cache, self.first_sequence, self.k_rows, self.heads)[None]
        return (x[None, self.k_rows] if self.packed else x[self.batch, self.k_rows])[:, :, self.heads]

    def row_view(self, x: Tensor) -> Tensor:
        """View of a tensor like lse: (batch, heads_kv, group, rows)."""
        part = x[None, :, self.q_rows] if self.packed else x[self.batch, :, self.q_rows]
        return part.unflatten(1, (self.spec.heads_kv, self.spec.group))[:, self.heads]

    def sink_view(self, sink: Tensor) -> Tensor:
        """Sinks in the compute dtype, broadcast to a row view: (1, heads_kv, group, 1)."""
        by_head = sink.to(compute_dtype(self.spec.dtype)).view(1, self.spec.heads_kv, self.spec.group, 1)
        return by_head[:, self.heads]

    def indices(self, q_rows: range, k_rows: range, device: torch.device) -> dict[str, Tensor]:
        """Index tensors b, h, q_idx, kv_idx of the traced functions, broadcast over the axes of `by_head`."""
        group, sequences = self.spec.group, self.batch.stop - self.batch.start
        h = torch.arange(self.heads.start * group, self.heads.stop * group, device=device)
        return {
            "b": torch.arange(sequences, device=device).add(self.first_sequence).view(-1, 1, 1, 1, 1),
            "h": h.view(1, -1, group, 1, 1),
            "q_idx": torch.arange(q_rows.start, q_rows.stop, device=device).view(-1, 1),
            "kv_idx": torch.arange(k_rows.start, k_rows.stop, device=device),
        }

    def by_head(self, tile: Tensor) -> Tensor:
        """View of a score tile as (batch, heads_kv, group, queries, keys)."""
        return tile.view(
            -1, self.heads.stop - self.heads.start, self.spec.group, tile.shape[1] // self.spec.group, tile.shape[2]
        )

    def split(self, one_by_one: bool = False) -> Iterator[Pass]:
        """Split into passes with score tiles of about TILE_SCORES entries, at least one head each."""
        per_head = max(1, self.spec.group * min(tiles.TILE_M, self.seqlen_q) * min(tiles.TILE_N, self.seqlen_k))
        budget = 1 if one_by_one else max(1, tiles.TILE_SCORES // per_head)  # heads of one pass, times sequences
        heads_step = min(budget, self.spec.heads_kv)
        batch_step = max(1, budget // self.spec.heads_kv)
        for b in range(self.batch.start, self.batch.stop, batch_step):
            batch = slice(b, min(b + batch_step, self.batch.stop))
            for h in range(0, self.spec.heads_kv, heads_step):
                first = self.first_sequence + b - self.batch.start
                heads = slice(h, min(h + heads_step, self.spec.heads_kv))
                yield replace(self, batch=batch, heads=heads, first_sequence=first)


def passes(
    inputs: AttentionInputs, spec: AttentionSpec, one_by_one: bool = False, cache: Cache | None = None
) -> Iterator[Pass]:
    every_head = slice(0, spec.heads_kv)
    lengths_differ = inputs.varlen or inputs.seqused_q is not None or inputs.seqused_k is not None
    if lengths_differ or cache is not None or spec.batch_invariant:
        for seq in sequences(inputs, cache):
            batch = slice(0, 1) if inputs.varlen else slice(seq.index, seq.index + 1)
            part = Pass(spec, inputs.varlen, batch, every_head, seq.q_rows, seq.k_rows, seq.index, cache)
            yield from part.split(one_by_one)
    else:
        q_rows, k_rows = slice(0, inputs.q.shape[1]), slice(0, inputs.k.shape[1])
        yield from Pass(spec, False, slice(0, inputs.batch), every_head, q_rows, k_rows, 0).split(one_by_one)
