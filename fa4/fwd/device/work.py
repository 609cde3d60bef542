"""Work tile of a forward kernel: its rows, keys and key blocks."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Int32

from ...core.cache import Keys
from ...core.mask import Band, BlockIterator, Blocks, ReverseRange, SparseBlocks
from ...core.order import Tile
from ...core.rows import Rows
from ..launch import ForwardContext


class Work(NamedTuple):
    """Work tile: one row block of one (packed) head of one sequence, with all its keys or one split-KV part of them."""

    index: Int32 | None  # position in the order of work; None if CTAs take tiles by a counter
    part: Int32  # split-KV part of the keys
    m_block: Int32
    head: Int32
    head_kv: Int32
    batch: Int32
    query_rows: Rows  # all query rows of the sequence
    q: Rows  # query rows that hold data
    k: Rows
    keys: Keys  # location of the key rows; with `cfg.one_block`, from the first key of the tile's block on
    mask: Band
    block_iter: BlockIterator  # over the key blocks

    @property
    def count(self) -> Int32:
        return self.block_iter.count


class Place(NamedTuple):
    """Place of a work tile in the order of work."""

    tile: Tile
    part: Int32  # split-KV part of the keys


def place_of(context: ForwardContext, index: Int32) -> Place:
    """Return the place of the work tile at `index`."""
    order = context.args.order
    if not context.cfg.split:
        return Place(order.at(index), Int32(0))
    return Place(order.at(index % order.tiles), index // order.tiles)


def work_tile(context: ForwardContext, index: Int32) -> Work:
    """Return the work tile at `index`; its `count` is 0 if no row has a visible key."""
    return work_at(context, place_of(context, index), index)


def work_at(context: ForwardContext, place: Place, index: Int32 | None = None) -> Work:
    """Return the work tile at a place in the order; its `count` is 0 if no row has a visible key."""
    args, cfg = context.args, context.cfg
    (m_block, head, batch), part = place
    query_rows = args.lengths.query_rows_of(batch, args.seqlen_q)
    q = args.lengths.queries(batch, args.seqlen_q)
    k = args.maps.k.tensor if cfg.has_kv_maps else args.k
    keys = Keys.of(args.lengths, args.cache, k, batch, cfg)
    k = keys.rows
    left = args.left if cfg.has_left else None
    right = args.right if cfg.has_right else None
    mask = Band(cfg.rows, cfg.tile_n, q.count, k.count, left, right, cfg.rows_per_query)
    head_kv = head if cfg.packed_heads == cfg.group else head * cfg.packed_heads // cfg.group
    block_iter: BlockIterator
    if cfg.has_blocks:
        block_q, block_k = cfg.mods.block
        row, ratio = m_block // (block_q // cfg.rows), block_k // cfg.tile_n
        exists = m_block * cfg.rows < q.count * cfg.rows_per_query if cfg.lengths_vary else None
        block_iter = SparseBlocks.of(args.mods.blocks, batch, head, row, ratio, k.count, cfg.tile_n, exists)
        return Work(index, part, m_block, head, head_kv, batch, query_rows, q, k, keys, mask, block_iter)
    if cfg.one_block:
        first_query = m_block * cfg.rows // cfg.rows_per_query
        last_query = cutlass.min(first_query + cfg.rows // cfg.rows_per_query, q.count) - 1
        has_keys = (mask.first_key(first_query) < mask.stop_key(last_query)) & (first_query < q.count)
        zero = Int32(0)
        blocks = Blocks(zero, zero, zero, Int32(cutlass.select_(has_keys, Int32(1), zero)))
        keys = keys.moved(mask.first_of_window(first_query))
        return Work(index, part, m_block, head, head_kv, batch, query_rows, q, k, keys, mask, ReverseRange(blocks))
    blocks = mask.key_blocks(m_block)
    if cfg.split:
        blocks = blocks.part(part, args.splits, args.part_blocks)
    is_empty = Boolean(m_block * cfg.rows >= q.count * cfg.rows_per_query)
    stop = cutlass.select_(is_empty, blocks.first, blocks.stop)
    blocks = Blocks(*(cutlass.min(Int32(bound), Int32(stop)) for bound in blocks))
    return Work(index, part, m_block, head, head_kv, batch, query_rows, q, k, keys, mask, ReverseRange(blocks))
