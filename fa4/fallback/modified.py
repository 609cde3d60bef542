"""Scores and masks of a call with functions, block masks or dropout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..mods import dropout
from ..mods.blocks import FULL, NONE, table_of
from ..mods.graph import Evaluation, parse
from ..mods.record import Mods
from ..mods.tensors import evaluation
from ..spec import AttentionSpec
from . import tiles
from .band import Band
from .passes import Pass
from .tiles import tiles_of


@dataclass(frozen=True, slots=True)
class Modified:
    """What of a call's mods does not change from pass to pass. table: the states of blocks, on the host."""

    mods: Mods
    spec: AttentionSpec
    table: Tensor | None

    @staticmethod
    def of(mods: Mods | None, spec: AttentionSpec, seqlen_k: int) -> Modified | None:
        if mods is None:
            return None
        table = table_of(mods.blocks[:4], -(-seqlen_k // mods.block_k)).cpu() if mods.blocks else None
        return Modified(mods, spec, table)

    @property
    def one_by_one(self) -> bool:
        """Whether heads or sequences have blocks of their own."""
        return self.table is not None and self.table.shape[:2] != (1, 1)

    def mask(self, part: Pass, band: Band) -> Band | Masked:
        graph = self.mods.mask
        if not graph and self.table is None:
            return band
        states = self.table
        if states is not None:
            batch, heads = states.shape[:2]
            states = states[part.first_sequence : part.first_sequence + 1] if batch > 1 else states
            of_group = slice(part.heads.start * self.spec.group, part.heads.stop * self.spec.group)
            states = states[0, of_group] if heads > 1 else states[0]
        return Masked(self, part, band, states)

    def score(self, part: Pass, s: Tensor, q_rows: range, k_rows: range) -> Evaluation:
        """The score's graph on a tile of S."""
        graph, (tensors, numbers) = parse(self.mods.score), self.mods.of_score()
        inputs = part.indices(q_rows, k_rows, s.device) | {"score": part.by_head(s)}
        return evaluation(graph, tensors, numbers, inputs, s.dtype)

    def kept(self, part: Pass, s: Tensor, q_rows: range, k_rows: range) -> Tensor | None:
        """What the probabilities of a tile of S are multiplied by, if some are dropped: 0 or 1 / (1 - p)."""
        if self.mods.dropout_seed is None:
            return None
        at, p = part.indices(q_rows, k_rows, s.device), self.mods.dropout_p
        pair, query = (at["b"] * self.spec.heads_q + at["h"])[..., 0], at["q_idx"][..., 0]
        kept = dropout.keep(p, self.mods.dropout_seed, pair, query, k_rows)
        return kept.reshape(s.shape).to(s.dtype).mul_(dropout.Rate.of(p).scale)


@dataclass(frozen=True, slots=True)
class Masked:
    """A `Band` of which a block mask and a mask_mod hide more.

    states: of the blocks, (heads of the group or 1, blocks of queries, blocks of keys); None if there are no blocks.
    """

    of: Modified
    part: Pass
    band: Band
    states: Tensor | None

    def query_tiles(self) -> Iterator[range]:
        if self.states is None:
            return self.band.query_tiles()
        return self._in_blocks(range(self.states.shape[1]), self.of.mods.block_q, self.part.seqlen_q, tiles.TILE_M)

    def key_tiles(self) -> Iterator[range]:
        if self.states is None:
            return self.band.key_tiles()
        return self._in_blocks(range(self.states.shape[2]), self.of.mods.block_k, self.part.seqlen_k, tiles.TILE_N)

    def keys(self, q_rows: range) -> Iterator[range]:
        if self.states is None:
            return self.band.keys(q_rows)
        row = self.states[:, q_rows.start // self.of.mods.block_q]
        met = (row != NONE).any(0).nonzero().flatten().tolist()
        return self._in_blocks(met, self.of.mods.block_k, self.part.seqlen_k, tiles.TILE_N)

    def queries(self, k_rows: range) -> Iterator[range]:
        if self.states is None:
            return self.band.queries(k_rows)
        column = self.states[:, :, k_rows.start // self.of.mods.block_k]
        met = (column != NONE).any(0).nonzero().flatten().tolist()
        return self._in_blocks(met, self.of.mods.block_q, self.part.seqlen_q, tiles.TILE_M)

    @staticmethod
    def _in_blocks(blocks: Iterable[int], size: int, rows: int, tile: int) -> Iterator[range]:
        for block in blocks:
            yield from tiles_of(range(block * size, min((block + 1) * size, rows)), tile)

    def hide(self, s: Tensor, q_rows: range, k_rows: range) -> None:
        self.band.hide(s, q_rows, k_rows)
        mods, seen, full = self.of.mods, None, None
        if self.states is not None:
            state = self.states[:, q_rows.start // mods.block_q, k_rows.start // mods.block_k]
            if (state == FULL).all():
                return
            full = (state == FULL).to(s.device).view(-1, 1, 1)
            seen = (state != NONE).to(s.device).view(-1, 1, 1)
        if mods.mask:
            tensors, numbers = mods.of_mask()
            inputs = self.part.indices(q_rows, k_rows, s.device)
            done = evaluation(parse(mods.mask), tensors, numbers, inputs, s.dtype)
            by_element = done.value(done.graph.result)
            seen = by_element if seen is None or full is None else full | (seen & by_element)
        if seen is not None:
            s.masked_fill_(~seen, -torch.inf)


def mask_of(part: Pass, modified: Modified | None) -> Band | Masked:
    band = Band.of(part.spec, part.seqlen_q, part.seqlen_k)
    return band if modified is None else modified.mask(part, band)
