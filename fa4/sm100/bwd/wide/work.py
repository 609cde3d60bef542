"""Work of one CTA: the rows that it owns, and the blocks of the other side in its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32

from ....core.mask import Band, SparseBlocks
from ....core.rows import Rows, first_row_block
from ..work import ListPosition, Sm100BackwardWork, next_position
from ..work import work_tile as keys_of_cta
from .config import Sm100WideConfig
from .context import Sm100WideContext


class QueryWork(NamedTuple):
    """A query block of a CTA or of a pair, and its steps: `steps` key blocks from `first` on, or listed ones."""

    head: Int32
    head_kv: Int32
    batch: Int32
    q: Rows
    k: Rows
    mask: Band  # with key blocks of a step
    first: Int32
    row_block: Int32
    block_iter: SparseBlocks | None
    steps: Int32
    rank: Int32  # of this CTA in its pair
    own_block: Int32  # this CTA's block of `cta_tile_n` queries

    @property
    def own_head(self) -> Int32:
        """Head of the rows that the CTA owns."""
        return self.head

    def block(self, i: Int32) -> Int32:
        """Key block of step i."""
        return self.first + i if self.block_iter is None else self.block_iter.block(i)

    def needs_mask(self, n_block: Int32, cfg: Sm100WideConfig) -> Boolean:
        """True if the band masks some pair of this CTA's queries and a key block."""
        return replace(self.mask, tile_m=cfg.cta_tile_n).needs_mask(self.own_block, n_block)


def query_work(context: Sm100WideContext) -> QueryWork:
    """Return the query block of this CTA; `steps` is 0 if none of its queries sees a key."""
    args, cfg = context.args, context.cfg
    m_block, head, batch = args.order.here()
    q, k = args.lengths.queries(batch, args.seqlen_q), args.lengths.keys(batch, args.seqlen_k)
    left, right = args.left if cfg.has_left else None, args.right if cfg.has_right else None
    mask = Band(cfg.cluster_rows, cfg.tile_m, q.count, k.count, left, right)
    row_block = first_row_block(batch, q, args.seqlen_q, cfg.tile_m, 1, cfg.varlen)
    exists, block_iter = m_block * cfg.cluster_rows < q.count, None
    if cfg.has_blocks:
        block_q, block_k = cfg.mods.block
        row, ratio = m_block // (block_q // cfg.cluster_rows), block_k // cfg.tile_m
        in_lists = exists if cfg.lengths_vary else None
        block_iter = SparseBlocks.of(args.mods.of_queries, batch, head, row, ratio, k.count, cfg.tile_m, in_lists)
        first, steps = Int32(0), block_iter.count
    else:
        blocks = mask.key_blocks(m_block)
        first, steps = blocks.first, Int32(cutlass.select_(exists, blocks.stop - blocks.first, Int32(0)))
    rank = args.order.rank
    own_block = m_block * cfg.ctas + rank
    return QueryWork(
        head, head // cfg.group, batch, q, k, mask, first, row_block, block_iter, steps, rank, own_block
    )  # fmt: skip


WideWork = Sm100BackwardWork | QueryWork


def work_tile(context: Sm100WideContext) -> WideWork:
    return keys_of_cta(context) if context.cfg.gradient.owns_keys else query_work(context)


class StepBlocks(NamedTuple):
    """Iterator over the steps of a CTA: block of the other side, and the head of its matrices. position: see
    `ListPosition`; None if all query heads of the group have the same steps."""

    index: Int32
    position: ListPosition | None

    @staticmethod
    def first(context: Sm100WideContext, work: WideWork) -> StepBlocks:
        if isinstance(work, Sm100BackwardWork) and context.cfg.lists_by_head:
            return StepBlocks(Int32(0), ListPosition.first(context, work))
        return StepBlocks(Int32(0), None)

    def coord(self, context: Sm100WideContext, work: WideWork) -> tuple[Int32, Int32]:
        """(head, block) of the step."""
        if isinstance(work, QueryWork):
            return work.head_kv, work.block(self.index)
        if self.position is not None:
            return self.position.coord(context, work)
        return work.step(self.index, context.cfg.group)

    def next(self, context: Sm100WideContext, work: WideWork) -> StepBlocks:
        position = self.position
        if position is not None and isinstance(work, Sm100BackwardWork):
            position = next_position(context, work, position)
        return StepBlocks(self.index + 1, position)
