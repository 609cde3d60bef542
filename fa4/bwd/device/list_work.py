"""Work of a CTA, or of a pair, of a backward of lists: query heads of a token that share a key/value head of a list."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..lists import SparseContext


class SparseWork(NamedTuple):
    """first: row of the tile's first query head. head: key/value head of the list. count: keys of the list."""

    token: Int32
    part: Int32
    first: Int32
    list: Int32
    head: Int32
    count: Int32

    def blocks(self, context: SparseContext) -> Int32:
        return cute.ceil_div(self.count, context.cfg.tile_n)

    def block(self, context: SparseContext, start: Int32, i: Int32) -> Int32:
        """Return the i-th block in the order of a loop that starts with `start` and wraps around."""
        block, blocks = start + i, self.blocks(context)
        return Int32(cutlass.select_(block < blocks, block, block - blocks))

    def key_row(self, context: SparseContext, key: Int32) -> Int32:
        """Return the row of k and v of a listed key; of any valid row if the list has no such key."""
        last = cutlass.max(self.count - 1, 0)
        return context.args.tensors.rows[self.token, self.list, cutlass.min(key, last)]

    def target_row(self, context: SparseContext, key: Int32) -> Int32:
        """Return the row of dk and dv for a listed key, or any row if the list has no such key."""
        if not context.cfg.deterministic:
            return self.key_row(context, key)
        lists, longest = context.args.tensors.rows.shape[1:]
        return (self.token * lists + self.list) * longest + key

    def matrix(self, x: cute.Tensor) -> cute.Tensor:
        """Return the part of q, out, dout or dq: (rows, columns)."""
        return x[None, None, self.part, self.token]


def work_tile(context: SparseContext) -> SparseWork:
    """Return the work of this CTA or pair."""
    cfg, t = context.cfg, context.args.tensors
    index, per = Int32(cute.arch.block_idx()[0]) // cfg.ctas, cute.size(t.k, mode=[1])
    tile, index = index % cfg.row_tiles, index // cfg.row_tiles
    parts = cute.size(t.q, mode=[2])
    part, token = index % parts, index // parts
    list_ = part // per
    return SparseWork(token, part, tile * cfg.tile_m, list_, part % per, t.count[token, list_])
