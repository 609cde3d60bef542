"""Scores and masks of a call with a score_mod, a mask_mod, a block mask or dropout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..mods.frontend.blocks import FULL, NONE, state_table
from ..mods.ir import dropout
from ..mods.ir.graph import Evaluation, parse
from ..mods.ir.record import Mods
from ..mods.ir.tensors import evaluation
from ..runtime.spec import AttentionSpec
from . import tiles
from .band import Band
from .passes import Pass
from .tiles import tiles_of


@dataclass(frozen=True, slots=True)
class ModifiedCall:
    """Mods of a call: the part that is the same in all passes. table: states of the block mask, on the host."""

    mods: Mods
    spec: AttentionSpec
    table: Tensor | None

    @staticmethod
    def of(mods: Mods | None, spec: AttentionSpec, seqlen_k: int) -> ModifiedCall | None:
        if mods is None:
            return None
        table = state_table(mods.blocks[:4], -(-seqlen_k // mods.block_k)).cpu() if mods.blocks else None
        return ModifiedCall(mods, spec, table)

    @property
    def one_by_one(self) -> bool:
        """True if the block mask differs between heads or sequences."""
        return self.table is not None and self.table.shape[:2] != (1, 1)

    def mask(self, part: Pass, band: Band) -> Band | ModifiedMask:
        graph = self.mods.mask
        if not graph and self.table is None:
            return band
        states = self.table
        if states is not None:
            batch, heads = states.shape[:2]
            states = states[part.first_sequence : part.first_sequence + 1] if batch > 1 else states
            group_heads = slice(part.heads.start * self.spec.group, part.heads.stop * self.spec.group)
            states = states[0, group_heads] if heads > 1 else states[0]
        return ModifiedMask(self, part, band, states)

    def score(self, part: Pass, s: Tensor, q_rows: range, k_rows: range) -> Evaluation:
        """Evaluate the graph of the score_mod on a tile of S."""
        graph, (tensors, numbers) = parse(self.mods.score), self.mods.score_values()
        inputs = part.indices(q_rows, k_rows, s.device) | {"score": part.by_head(s)}
        return evaluation(graph, tensors, numbers, inputs, s.dtype)

    def kept(self, part: Pass, s: Tensor, q_rows: range, k_rows: range) -> Tensor | None:
        """Dropout factors of a tile of P, shaped like s: 0 or 1 / (1 - p); None without dropout."""
        if self.mods.dropout_seed is None:
            return None
        indices, p = part.indices(q_rows, k_rows, s.device), self.mods.dropout_p
        pair, query = (indices["b"] * self.spec.heads_q + indices["h"])[..., 0], indices["q_idx"][..., 0]
        kept = dropout.keep(p, self.mods.dropout_seed, pair, query, k_rows)
        return kept.reshape(s.shape).to(s.dtype).mul_(dropout.Rate.of(p).scale)


@dataclass(frozen=True, slots=True)
class ModifiedMask:
    """Intersection of a `Band` with a block mask and a mask_mod.

    states: of the block mask, (query heads of the pass or 1, query blocks, key blocks); None without a block mask.
    """

    call: ModifiedCall
    part: Pass
    band: Band
    states: Tensor | None

    def query_tiles(self) -> Iterator[range]:
        if self.states is None:
            return self.band.query_tiles()
        return self._in_blocks(range(self.states.shape[1]), self.call.mods.block_q, self.part.seqlen_q, tiles.TILE_M)

    def key_tiles(self) -> Iterator[range]:
        if self.states is None:
            return self.band.key_tiles()
        return self._in_blocks(range(self.states.shape[2]), self.call.mods.block_k, self.part.seqlen_k, tiles.TILE_N)

    def keys(self, q_rows: range) -> Iterator[range]:
        if self.states is None:
            return self.band.keys(q_rows)
        row = self.states[:, q_rows.start // self.call.mods.block_q]
        blocks = (row != NONE).any(0).nonzero().flatten().tolist()
        return self._in_blocks(blocks, self.call.mods.block_k, self.part.seqlen_k, tiles.TILE_N)

    def queries(self, k_rows: range) -> Iterator[range]:
        if self.states is None:
            return self.band.queries(k_rows)
        column = self.states[:, :, k_rows.start // self.call.mods.block_k]
        blocks = (column != NONE).any(0).nonzero().flatten().tolist()
        return self._in_blocks(blocks, self.call.mods.block_q, self.part.seqlen_q, tiles.TILE_M)

    @staticmethod
    def _in_blocks(blocks: Iterable[int], size: int, rows: int, tile: int) -> Iterator[range]:
        for block in blocks:
            yield from tiles_of(range(block * size, min((block + 1) * size, rows)), tile)

    def apply_mask(self, s: Tensor, q_rows: range, k_rows: range) -> None:
        self.band.apply_mask(s, q_rows, k_rows)
        mods, unmasked, full = self.call.mods, None, None
        if self.states is not None:
            state = self.states[:, q_rows.start // mods.block_q, k_rows.start // mods.block_k]
            if (state == FULL).all():
                return
            full = (state == FULL).to(s.device).view(-1, 1, 1)
            unmasked = (state != NONE).to(s.device).view(-1, 1, 1)
        if mods.mask:
            tensors, numbers = mods.mask_values()
            inputs = self.part.indices(q_rows, k_rows, s.device)
            evaluated = evaluation(parse(mods.mask), tensors, numbers, inputs, s.dtype)
            mask_mod = evaluated.value(evaluated.graph.result)
            unmasked = mask_mod if unmasked is None or full is None else full | (unmasked & mask_mod)
        if unmasked is not None:
            s.masked_fill_(~unmasked, -torch.inf)


def mask_of(part: Pass, modified: ModifiedCall | None) -> Band | ModifiedMask:
    band = Band.of(part.spec, part.seqlen_q, part.seqlen_k)
    return band if modified is None else modified.mask(part, band)
