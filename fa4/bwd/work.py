"""What a CTA of a backward works on: a block of keys of one key/value head, and the query blocks that see it."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32

from ..core.mask import Band, Listed
from ..core.order import Order
from ..core.rows import first_row_block
from ..core.sequence import Rows


class Keys(NamedTuple):
    """A block of `cfg.span` keys, and the blocks first <= m < stop of `cfg.tile_m` queries that see some."""

    n_block: Int32
    head_kv: Int32
    batch: Int32
    q: Rows  # the sequence's query rows that hold data
    k: Rows
    mask: Band
    first: Int32
    stop: Int32
    row_block: Int32  # where the sequence's query blocks begin in the row workspaces
    walk: Listed | None  # if a block mask lists the query blocks: `first` and `stop` are places of the walk


def keys_here(context) -> Keys:
    """This CTA's."""
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
    walk = None
    if cfg.has_blocks:
        block_q, block_k = cfg.mods.block
        column, ratio = n_block // (block_k // cfg.span), block_q // cfg.tile_m
        exists = n_block * cfg.span < k.count if cfg.lengths_vary else None
        walk = Listed.of(args.mods.blocks, batch, head_kv, column, ratio, q.count, cfg.tile_m, exists)
        first, stop = Int32(0), walk.count
    return Keys(n_block, head_kv, batch, q, k, mask, first, stop, row_block, walk)


def turn(order: Order, mask: Band, m_block: Int32, n_block: Int32) -> Int32:
    """How many key blocks add to dQ of a query block before this one; all that the query block meets do, in order."""
    met = mask.key_blocks(m_block)
    return order.turn(n_block, met.first, met.stop)


def turn_by_lists(args, cfg, block: Int32, head: Int32, n_block: Int32) -> Int32:
    """The same where a block mask's lists say which key blocks meet. block: the query block in the row workspaces."""
    tiles = cfg.mods.block[1] // cfg.span
    return args.ranks[n_block // tiles, block, head] * tiles + n_block % tiles
