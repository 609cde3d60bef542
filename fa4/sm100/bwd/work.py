"""What one CTA works on: a block of keys of one key/value head, and the query blocks that see it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from cutlass import Boolean, Int32

from ...bwd.work import keys_here, turn, turn_by_lists
from ...core.mask import Band, Listed
from ...core.sequence import Rows
from .config import TILE_N


class Work(NamedTuple):
    """A block of keys, of a CTA or of a pair, and its steps: for each query head of the group, the query blocks
    first <= m < stop."""

    n_block: Int32  # down to `row_block`: see `Keys`
    head_kv: Int32
    batch: Int32
    q: Rows
    k: Rows
    mask: Band
    first: Int32
    stop: Int32
    row_block: Int32
    walk: Listed | None
    rank: Int32  # of this CTA in its pair
    own_block: Int32  # this CTA's block of TILE_N keys
    steps: Int32

    def step(self, index: Int32, group: int) -> tuple[Int32, Int32]:
        """(query head, query block) of a step."""
        blocks = self.stop - self.first
        return self.head_kv * group + index // blocks, self.block(self.first + index % blocks)

    def block(self, i: Int32) -> Int32:
        """The query block of a step of a head: i itself, or that at a place of the lists."""
        return i if self.walk is None else self.walk.block(i)

    def cuts(self, m_block: Int32) -> Boolean:
        """Whether some query of a block misses some of this CTA's keys."""
        return replace(self.mask, tile_n=TILE_N).cuts(m_block, self.own_block)

    def turn(self, m_block: Int32, head: Int32, context) -> Int32:
        """How many key blocks add to dQ of a query block before this one."""
        cfg = context.cfg
        if cfg.has_blocks:
            return turn_by_lists(context.args, cfg, self.row_block + m_block, head, self.n_block)
        return turn(context.args.order, self.mask, m_block, self.n_block)


def work_tile(context) -> Work:
    """This CTA's work; `steps` is 0 if no query sees a key of the block."""
    cfg, keys, rank = context.cfg, keys_here(context), context.args.order.rank
    own_block, steps = keys.n_block * cfg.ctas + rank, (keys.stop - keys.first) * cfg.group
    return Work(*keys, rank, own_block, steps)
