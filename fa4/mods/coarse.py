"""Block masks of other block sizes as ones of the blocks that kernels walk, and those of each head as ones of groups.

A kernel's block is partial if some of the caller's blocks in it are listed and not all of them whole, and full if all
are. What the caller's lists say of a pair then becomes a part of the mask_mod, which looks up the state of the pair's
block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .blocks import FULL, NONE, PARTIAL, listed, orders, table_of
from .graph import Builder, Graph, TensorType, parse
from .record import OF_BLOCKS, Mods, ModSpec

TILE = 128  # kernels walk blocks of multiples of it
_LEAST = 16  # that block sizes must have in common with it: tables of smaller blocks are large


def takes(block: tuple[int, int]) -> bool:
    """Whether a block size is none that kernels walk, and can be made one."""
    return any(size % TILE for size in block) and all(math.gcd(size, TILE) >= _LEAST for size in block)


def in_tiles(mods: Mods, seqlens: tuple[int, int]) -> Mods:
    """The same mask by blocks of multiples of TILE; `takes` its block size. seqlens: queries and keys."""
    block = mods.block_q, mods.block_k
    sizes = tuple(size if size % TILE == 0 else TILE for size in block)
    table = table_of(mods.blocks[:4], -(-seqlens[1] // block[1]))
    pooled = table
    for axis in range(2):
        pooled = _pooled(pooled, 2 + axis, block[axis], sizes[axis], seqlens[axis])
    has_other_side = mods.blocks[4].numel() > 0
    of_keys = listed(pooled)
    of_queries = listed(pooled.transpose(2, 3)) if has_other_side else mods.blocks[4:8]
    graph = _with_states(parse(mods.mask) if mods.mask else None, block, table.shape)
    return mods._replace(
        tensors=[*mods.tensors, table.to(torch.int32)],
        blocks=[*of_keys, *of_queries, *orders(of_keys, of_queries), *mods.blocks[OF_BLOCKS:]],
        mask=graph.text,
        block_q=sizes[0],
        block_k=sizes[1],
    )


def of_groups(mods: Mods, batch: int, heads: int, group: int) -> Mods:
    """The same mask by lists that all query heads of a group share; of all blocks that one of them lists."""
    table = table_of(mods.blocks[:4], mods.key_blocks).expand(batch, heads, -1, -1)
    parts = table.unflatten(1, (heads // group, group))
    pooled = (parts != NONE).any(2).to(torch.uint8) + (parts == FULL).all(2).to(torch.uint8)
    of_keys, of_queries = listed(pooled), listed(pooled.transpose(2, 3))
    return mods._replace(
        tensors=[*mods.tensors, table.to(torch.int32)],
        blocks=[*of_keys, *of_queries, *orders(of_keys, of_queries), *mods.blocks[OF_BLOCKS:]],
        mask=mask_of_groups(mods.spec()).text,
    )


def mask_of_groups(mods: ModSpec) -> Graph:
    """The mask_mod that goes with `of_groups`: its table has all sequences and heads."""
    assert mods.block is not None
    return _with_states(mods.mask, mods.block, (2, 2))


def _pooled(table: Tensor, axis: int, block: int, size: int, rows: int) -> Tensor:
    """The table with blocks of `size` instead of `block` along an axis of `rows`."""
    if block == size:
        return table
    part = math.gcd(block, size)
    parts = table.repeat_interleave(block // part, dim=axis)
    each, count = size // part, -(-rows // size)
    parts = parts.narrow(axis, 0, min(parts.shape[axis], count * each))
    padding = [0, 0] * (parts.ndim - 1 - axis) + [0, count * each - parts.shape[axis]]
    parts = torch.nn.functional.pad(parts, padding, value=NONE).unflatten(axis, (count, each))
    some, whole = (parts != NONE).any(axis + 1), (parts == FULL).all(axis + 1)
    return some.to(torch.uint8) + whole.to(torch.uint8)


def _with_states(mask: Graph | None, block: tuple[int, int], shape: Sequence[int]) -> Graph:
    """A mask_mod's graph that asks a table of states too, a tensor behind those it has. shape: the table's, whose first
    two sizes are 1 where sequences or heads share it."""
    builder = Builder.of(mask)
    tensors = () if mask is None else mask.tensors
    batch, head = (builder.input(x) if extent > 1 else builder.const(0, "int") for x, extent in zip("bh", shape))
    row, key = (
        builder.op("floordiv", builder.input(name), builder.const(size, "int"))
        for name, size in zip(("q_idx", "kv_idx"), block)
    )
    state = builder.load(len(tensors), (batch, head, row, key), "int")
    seen = builder.op("eq", state, builder.const(PARTIAL, "int"))
    if mask is not None:
        seen = builder.op("and", seen, mask.result)
    seen = builder.op("or", seen, builder.op("eq", state, builder.const(FULL, "int")))
    numbers = () if mask is None else mask.numbers
    return Graph(builder.nodes, seen, (*tensors, TensorType(4, "int32")), numbers)
