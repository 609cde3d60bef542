"""What one CTA works on: a block of keys of one key/value head, and the query blocks that see it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32

from ...core.mask import Band, Mask
from ...core.rows import first_row_block
from ...core.sequence import Rows
from .config import TILE_N


class Work(NamedTuple):
    """A block of keys, of a CTA or of a pair, and its steps: for each query head of the group, the query blocks
    first <= m < stop."""

    n_block: Int32
    rank: Int32  # of this CTA in its pair
    own_block: Int32  # this CTA's block of TILE_N keys
    head_kv: Int32
    batch: Int32
    q: Rows  # the sequence's query rows that hold data
    k: Rows
    mask: Mask
    first: Int32
    stop: Int32
    steps: Int32
    row_block: Int32  # where the sequence's query blocks begin in the row workspaces

    def step(self, index: Int32, group: int) -> tuple[Int32, Int32]:
        """(query head, query block) of a step."""
        blocks = self.stop - self.first
        return self.head_kv * group + index // blocks, self.first + index % blocks

    def cuts(self, m_block: Int32) -> Boolean:
        """Whether some query of a block misses some of this CTA's keys."""
        return replace(self.mask, tile_n=TILE_N).cuts(m_block, self.own_block)

    def turn(self, m_block: Int32, descending: bool) -> Int32:
        """How many key blocks add to dQ of a query block before this one; all that the query block meets do."""
        met = self.mask.key_blocks(m_block)
        return met.stop - 1 - self.n_block if descending else self.n_block - met.first


def work_tile(context) -> Work:
    """This CTA's work; `steps` is 0 if no query sees a key of the block."""
    args, cfg = context.args, context.cfg
    n_block, head_kv, batch = args.order.here()
    q = args.lengths.queries(batch, args.seqlen_q)
    k = args.lengths.keys(batch, args.seqlen_k)
    left = args.left if cfg.has_left else None
    right = args.right if cfg.has_right else None
    mask = Band(cfg.tile_m, cfg.span, q.count, k.count, left, right)
    first, stop = mask.query_blocks(n_block)
    stop = Int32(cutlass.select_(n_block * cfg.span < k.count, stop, first))
    row_block = first_row_block(batch, q, args.seqlen_q, cfg.tile_m, 1, cfg.varlen)
    rank = args.order.rank
    own_block, steps = n_block * cfg.ctas + rank, (stop - first) * cfg.group
    return Work(n_block, rank, own_block, head_kv, batch, q, k, mask, first, stop, steps, row_block)
