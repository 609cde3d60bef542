"""Work of a backward CTA: a key block of one key/value head, and the query blocks with visible keys in it."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...core.mask import Band, SparseBlocks
from ...core.order import Order, Tile
from ...core.rows import Rows, first_row_block
from ..launch import BackwardContext
from ..variant import BackwardOptions


class KeyBlock(NamedTuple):
    """A block of `cfg.cluster_tile_n` keys, and its query blocks first <= m < stop, of `cfg.tile_m` queries."""

    n_block: Int32
    head_kv: Int32
    batch: Int32
    q: Rows  # query rows of the sequence that hold data
    k: Rows
    mask: Band
    first: Int32
    stop: Int32
    row_block: Int32  # index of the sequence's first query block in the row workspaces
    block_iter: SparseBlocks | None  # query blocks listed by a block mask; then `first` and `stop` are its positions
    steps: Int32  # number of query blocks over all heads of the group


KeyFields: TypeAlias = Any
"""A `KeyBlock`, or a chip's record that starts with the same fields."""


def cta_keys(context: BackwardContext) -> KeyBlock:
    """Return the work of this CTA."""
    args, cfg = context.args, context.cfg
    n_block, head_kv, batch = args.order.here()
    q = args.lengths.queries(batch, args.seqlen_q)
    k = args.lengths.keys(batch, args.seqlen_k)
    left = args.left if cfg.has_left else None
    right = args.right if cfg.has_right else None
    mask = Band(cfg.tile_m, cfg.cluster_tile_n, q.count, k.count, left, right)
    first, stop = mask.query_blocks(n_block)
    stop = Int32(cutlass.select_(n_block * cfg.cluster_tile_n < k.count, stop, first))
    row_block = first_row_block(batch, q, args.seqlen_q, cfg.tile_m, 1, cfg.varlen)
    keys = KeyBlock(n_block, head_kv, batch, q, k, mask, first, stop, row_block, None, (stop - first) * cfg.group)
    if not cfg.has_blocks:
        return keys
    if cfg.lists_by_head:
        block_iter, steps = sparse_blocks_of(context, keys, head_kv * cfg.group), steps_of_group(context, keys)
    else:
        block_iter = sparse_blocks_of(context, keys, head_kv)
        steps = block_iter.count * cfg.group
    return keys._replace(first=Int32(0), stop=block_iter.count, block_iter=block_iter, steps=steps)


def sparse_blocks_of(context: BackwardContext, keys: KeyFields, head: Int32) -> SparseBlocks:
    """Query blocks of a key block, from the block-mask lists of a query head."""
    args, cfg = context.args, context.cfg
    block_q, block_k = cfg.mods.block
    column, ratio = keys.n_block // (block_k // cfg.cluster_tile_n), block_q // cfg.tile_m
    exists = keys.n_block * cfg.cluster_tile_n < keys.k.count if cfg.lengths_vary else None
    return SparseBlocks.of(args.mods.blocks, keys.batch, head, column, ratio, keys.q.count, cfg.tile_m, exists)


@cute.jit
def steps_of_group(context: BackwardContext, keys: KeyFields) -> Int32:
    """Number of query blocks in the lists of all heads of the group."""
    total = Int32(0)
    for member in cutlass.range(context.cfg.group, unroll=1):
        total = total + sparse_blocks_of(context, keys, keys.head_kv * context.cfg.group + member).count
    return total


@cute.jit
def first_member(context: BackwardContext, keys: KeyFields) -> Int32:
    """Index in the group of the first query head with non-empty lists; 0 if all heads have the same lists."""
    first = Int32(0)
    if const_expr(context.cfg.lists_by_head):
        for i in cutlass.range(context.cfg.group, unroll=1):
            member = context.cfg.group - 1 - i
            count = sparse_blocks_of(context, keys, keys.head_kv * context.cfg.group + member).count
            first = Int32(cutlass.select_(count > 0, member, first))
    return first


def order_index(
    context: BackwardContext, keys: KeyFields, m_block: Int32, head: Int32, block: Int32, mask: Band
) -> Int32:
    """Number of key blocks that add to dQ of a query block before this one. All visible key blocks add, in order, and
    the CTAs of the earlier ones have lower launch indices. block, mask: index and mask of the keys whose dQ is added at
    once."""
    args = context.args
    if context.cfg.has_blocks:
        return order_index_by_lists(args.ranks, context.cfg, keys.row_block + m_block, head, keys.n_block)
    assert isinstance(args.order, Order)  # a deterministic backward has no packed order
    key_blocks = mask.key_blocks(m_block)
    return args.order.order_index(Tile(block, keys.head_kv, keys.batch), key_blocks.first, key_blocks.stop)


def order_index_by_lists(ranks: cute.Tensor, cfg: BackwardOptions, block: Int32, head: Int32, n_block: Int32) -> Int32:
    """`order_index` with the lists of a block mask. ranks: see `ranks`. block: index of the query block in the row
    workspaces."""
    tiles = cfg.mods.block[1] // cfg.cluster_tile_n
    return ranks[n_block // tiles, block, head] * tiles + n_block % tiles
