"""Conversion of block masks: other block sizes to kernel tiles, and per-head lists to per-group lists.

A kernel's block is full if all of the caller's blocks in it are full, and partial if some are listed. The mask_mod then
also looks up the state of each pair's original block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ir.graph import Builder, Graph, TensorType, parse
from ..ir.record import NUM_BLOCK_TENSORS, Mods, ModSpec
from .blocks import FULL, NONE, PARTIAL, listed, orders, state_table

TILE = 128  # kernels process blocks of multiples of it
_MIN_COMMON = 16  # minimum common factor of block sizes and TILE: tables of smaller blocks are large


def needs_tiling(block: tuple[int, int]) -> bool:
    """Whether kernels cannot use this block size directly, and it can be converted."""
    return any(size % TILE for size in block) and all(math.gcd(size, TILE) >= _MIN_COMMON for size in block)


def in_tiles(mods: Mods, seqlens: tuple[int, int]) -> Mods:
    """Convert a mask to block sizes that are multiples of TILE. seqlens: queries and keys."""
    block = mods.block_q, mods.block_k
    sizes = tuple(size if size % TILE == 0 else TILE for size in block)
    table = state_table(mods.blocks[:4], -(-seqlens[1] // block[1]))
    pooled = table
    for axis in range(2):
        pooled = _pooled(pooled, 2 + axis, block[axis], sizes[axis], seqlens[axis])
    has_other_side = mods.blocks[4].numel() > 0
    of_keys = listed(pooled)
    of_queries = listed(pooled.transpose(2, 3)) if has_other_side else mods.blocks[4:8]
    graph = _with_state_lookup(parse(mods.mask) if mods.mask else None, block, table.shape)
    return _with_states(mods, table, graph, of_keys, of_queries)._replace(block_q=sizes[0], block_k=sizes[1])


def to_head_groups(mods: Mods, batch: int, heads: int, group: int) -> Mods:
    """Convert a mask to lists shared by all query heads of a group: the union of their blocks."""
    table = state_table(mods.blocks[:4], mods.key_blocks).expand(batch, heads, -1, -1)
    parts = table.unflatten(1, (heads // group, group))
    pooled = (parts != NONE).any(2).to(torch.uint8) + (parts == FULL).all(2).to(torch.uint8)
    return _with_states(mods, table, mask_of_groups(mods.spec()), listed(pooled), listed(pooled.transpose(2, 3)))


def _with_states(
    mods: Mods, table: Tensor, mask: Graph, of_keys: Sequence[Tensor], of_queries: Sequence[Tensor]
) -> Mods:
    """Return mods with other block lists, and the state table that the other mask_mod reads."""
    lists = [*of_keys, *of_queries, *orders(of_keys, of_queries), *mods.blocks[NUM_BLOCK_TENSORS:]]
    return mods._replace(tensors=[*mods.tensors, table.to(torch.int32)], blocks=lists, mask=mask.text)


def mask_of_groups(mods: ModSpec) -> Graph:
    """Return the mask_mod that goes with `to_head_groups`; its table covers all sequences and heads."""
    assert mods.block is not None
    return _with_state_lookup(mods.mask, mods.block, (2, 2))


def _pooled(table: Tensor, axis: int, block: int, size: int, rows: int) -> Tensor:
    """Convert the table from blocks of `block` to blocks of `size`, along an axis of `rows`."""
    if block == size:
        return table
    part = math.gcd(block, size)
    parts = table.repeat_interleave(block // part, dim=axis)
    parts_per_tile, count = size // part, -(-rows // size)
    parts = parts.narrow(axis, 0, min(parts.shape[axis], count * parts_per_tile))
    padding = [0, 0] * (parts.ndim - 1 - axis) + [0, count * parts_per_tile - parts.shape[axis]]
    parts = torch.nn.functional.pad(parts, padding, value=NONE).unflatten(axis, (count, parts_per_tile))
    some, whole = (parts != NONE).any(axis + 1), (parts == FULL).all(axis + 1)
    return some.to(torch.uint8) + whole.to(torch.uint8)


def _with_state_lookup(mask: Graph | None, block: tuple[int, int], shape: Sequence[int]) -> Graph:
    """Extend a mask_mod's graph by a lookup in a state table, an additional last tensor. shape: the table's; its first
    two sizes are 1 where sequences or heads share it."""
    builder = Builder.of(mask)
    tensors = () if mask is None else mask.tensors
    batch, head = (builder.input(x) if extent > 1 else builder.const(0, "int") for x, extent in zip("bh", shape))
    row, key = (
        builder.op("floordiv", builder.input(name), builder.const(size, "int"))
        for name, size in zip(("q_idx", "kv_idx"), block)
    )
    state = builder.load(len(tensors), (batch, head, row, key), "int")
    visible = builder.op("eq", state, builder.const(PARTIAL, "int"))
    if mask is not None:
        visible = builder.op("and", visible, mask.result)
    visible = builder.op("or", visible, builder.op("eq", state, builder.const(FULL, "int")))
    numbers = () if mask is None else mask.numbers
    return Graph(builder.nodes, visible, (*tensors, TensorType(4, "int32")), numbers)
