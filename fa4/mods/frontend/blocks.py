"""Block masks: for each block of queries, the key blocks to visit, and which of these need no mask (full blocks).

The record is torch's own `BlockMask`, with lists for both sides; masks from torch work as well. Here the blocks of a
mask_mod are computed one row of blocks at a time: memory is O(N), not O(N^2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ir.ready import check_whole
from ..ir.tensors import evaluation
from .problem import ModProblem, check_fit
from .trace import ModError, Traced, trace_mask


class BlockLists(NamedTuple):
    """Tensors of a block mask, int32: the partial and the full key blocks of each query block, and the query blocks of
    each key block. counts: (batch or 1, heads or 1, blocks). lists: ascending, one more axis. orders: like counts, the
    blocks of queries and those of keys, longest lists first."""

    counts: Tensor
    lists: Tensor
    full_counts: Tensor
    full_lists: Tensor
    query_counts: Tensor
    query_lists: Tensor
    full_query_counts: Tensor
    full_query_lists: Tensor
    query_order: Tensor
    key_order: Tensor


NONE, PARTIAL, FULL = 0, 1, 2
OfRanges = Callable[..., tuple[Tensor, Tensor]]
"""of_ranges(b, h, first, stop, kv_idx) -> (some, whole): keys of some, and of all, of the queries `first` to `stop` -
1. `some` may be a superset, `whole` a subset. b (batch, 1, 1), h (heads, 1) and kv_idx (keys,) are int64, so results
broadcast to (batch, heads, keys)."""


def create_block_mask(
    mask_mod: Callable[..., Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> Any:
    """Create torch's `BlockMask` of a mask_mod, as torch's own create_block_mask does, in O(N) memory.

    Args:
        mask_mod: mask_mod(b, h, q_idx, kv_idx), see `flash_attn_func`. One with an attribute `of_ranges` (`fa4.masks`)
            is evaluated once for each block of queries and key, others once for each pair.
        B, H: batch and query heads; None for a mask that all of them share.
        device: device of the lists; None means that of the first captured tensor, else torch's default.

    Raises:
        ModError: mask_mod cannot be traced, or a captured tensor is too small.
        TypeError, ValueError: a size or the device is invalid.
    """
    from torch.nn.attention.flex_attention import BlockMask

    for name, size in (("B", B), ("H", H), ("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN)):
        if size is not None or name not in ("B", "H"):
            check_whole(name, size, 1)
    block = _block_size(BLOCK_SIZE)
    traced = trace_mask(mask_mod)
    if device is None:
        device = traced.tensors[0].device if traced.tensors else torch.get_default_device()
    try:
        device = torch.empty(0, device=device).device  # with its index
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ValueError(f"device is {device!r}, expected one of torch's that is here") from error
    check_fit("mask_mod", mask_mod, traced, ModProblem(B or 1, H or 1, Q_LEN, KV_LEN, device), "the block mask")
    of_ranges = getattr(mask_mod, "of_ranges", None)
    table = _state_table(traced, of_ranges, B or 1, H or 1, Q_LEN, KV_LEN, block, device)
    return BlockMask.from_kv_blocks(*listed(table), BLOCK_SIZE=block, mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN))


def _block_size(given: Any) -> tuple[int, int]:
    """Return query rows and keys of a block."""
    pair = given if isinstance(given, (tuple, list)) else (given, given)
    if len(pair) != 2:
        raise ValueError(f"BLOCK_SIZE is {given!r}, expected an integer or two: (queries, keys)")
    for size in pair:
        check_whole("BLOCK_SIZE", size, 1)
    return int(pair[0]), int(pair[1])


def _state_table(
    traced: Traced,
    of_ranges: OfRanges | None,
    batch: int,
    heads: int,
    rows: int,
    keys: int,
    block: tuple[int, int],
    device: torch.device,
) -> Tensor:
    """Return the state of each block: (batch, heads, blocks of queries, blocks of keys) uint8."""
    m, n = block
    columns = -(-keys // n)
    table = torch.empty(batch, heads, -(-rows // m), columns, dtype=torch.uint8, device=device)
    key = torch.arange(keys, device=device)
    b, h = torch.arange(batch, device=device).view(-1, 1, 1), torch.arange(heads, device=device).view(-1, 1)
    for i in range(table.shape[2]):
        first, stop = i * m, min((i + 1) * m, rows)
        if of_ranges is not None:
            some, whole = of_ranges(b, h, first, stop, key)
        else:
            row = torch.arange(first, stop, device=device)[:, None]
            inputs = {"b": b[..., None], "h": h[..., None], "q_idx": row, "kv_idx": key}
            evaluated = evaluation(traced.graph, traced.tensors, traced.numbers, inputs, torch.float32)
            mask = torch.broadcast_to(evaluated.value(traced.graph.result), (batch, heads, stop - first, keys))
            some, whole = mask.any(2), mask.all(2)
        # As in torch, a block cut by the last row or key counts as partial.
        some, whole = (
            torch.nn.functional.pad(x.expand(batch, heads, keys), (0, columns * n - keys)).unflatten(2, (columns, n))
            for x in (some, whole)
        )
        table[:, :, i] = some.any(3).to(torch.uint8) + (whole.all(3) & (stop - first == m)).to(torch.uint8)
    return table


def listed(table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return counts and lists of the partial blocks of a state table, then of the full ones, for each row over the last
    axis. Lists are ascending; entries past the count are 0. Few operations: lists of a small mask are made in each
    call."""
    columns = table.shape[-1]
    states = torch.arange(PARTIAL, FULL + 1, dtype=torch.uint8, device=table.device)
    selected = table == states.view(-1, *[1] * table.ndim)
    upto = selected.cumsum(-1)
    column = torch.arange(columns, dtype=torch.int32, device=table.device)
    # Blocks that are not selected go to a place before the first one.
    lists = torch.zeros(*selected.shape[:-1], columns + 1, dtype=torch.int32, device=table.device)
    lists.scatter_(-1, upto * selected, column.expand_as(upto))
    counts = selected.sum(-1, dtype=torch.int32)
    partial, full = lists[..., 1:].contiguous()
    return counts[0], partial, counts[1], full


def block_lists(block_mask: Any, both_sides: bool) -> BlockLists:
    """Return the tensors of a BlockMask, whose lists may have any order; the query side is empty unless
    `both_sides`."""
    of_keys = _side(block_mask, "kv")
    of_queries = _side_of_queries(block_mask, of_keys) if both_sides else tuple(x.new_zeros(0) for x in of_keys)
    return BlockLists._make((*of_keys, *of_queries, *orders(of_keys, of_queries)))


def source_tensors(block_mask: Any) -> list[Tensor]:
    """Return the tensors that `block_lists` reads. Kernels read copies; autograd saves these to detect changes."""
    return [x for x in (getattr(block_mask, name) for name in LISTS) if x is not None]


def orders(of_keys: Sequence[Tensor], of_queries: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the last two of `BlockLists`. Ties are in descending order for queries and ascending for keys: for a
    causal mask that is longest first."""
    (counts, _, full_counts, _), (query_counts, _, full_query_counts, _) = of_keys, of_queries
    if torch.compiler.is_compiling():  # no cached order here: sorting in each call would be too slow
        columns = torch.arange(counts.shape[-1], dtype=torch.int32, device=counts.device)
        along = torch.arange(query_counts.shape[-1], dtype=torch.int32, device=counts.device)
        return columns.flip(0).expand(counts.shape), along.expand(query_counts.shape)
    reversed_order = torch.argsort((counts + full_counts).flip(-1), dim=-1, descending=True, stable=True)
    order = torch.argsort(query_counts + full_query_counts, dim=-1, descending=True, stable=True)
    return (counts.shape[-1] - 1 - reversed_order).to(torch.int32), order.to(torch.int32)


def _side_of_queries(block_mask: Any, of_keys: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if block_mask.q_num_blocks is not None and (block_mask.full_q_num_blocks is None) == (
        block_mask.full_kv_num_blocks is None
    ):
        return _side(block_mask, "q")
    columns = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    return listed(state_table(of_keys, columns).transpose(2, 3))


IS_ASCENDING = "fa4_lists_are_ascending"
"""Attribute of a block mask of fa4's own that no caller sees: its lists are those of `listed`."""
_SIDE_FIELDS = ("num_blocks", "indices")
KEY_FIELDS = tuple(f"{kind}kv_{name}" for kind in ("", "full_") for name in _SIDE_FIELDS)
LISTS = *KEY_FIELDS, *(name.replace("kv_", "q_") for name in KEY_FIELDS)


def _side(block_mask: Any, side: str) -> tuple[Tensor, ...]:
    """Return counts and lists of partial blocks, then of full ones."""
    partial = [getattr(block_mask, f"{side}_{name}") for name in _SIDE_FIELDS]
    full = [getattr(block_mask, f"full_{side}_{name}") for name in _SIDE_FIELDS]
    if full[0] is None:
        full = [torch.zeros_like(x) for x in partial]
    counts, lists, full_counts, full_lists = (x.to(torch.int32).contiguous() for x in (*partial, *full))
    if getattr(block_mask, IS_ASCENDING, False):
        return counts, lists, full_counts, full_lists
    return counts, _ascending(counts, lists), full_counts, _ascending(full_counts, full_lists)


def _ascending(counts: Tensor, lists: Tensor) -> Tensor:
    """Sort the first `counts` entries of each list, as kernels require, and fill the rest with 0. torch accepts any
    order."""
    is_entry = torch.arange(lists.shape[-1], dtype=torch.int32, device=lists.device) < counts[..., None]
    ordered = torch.where(is_entry, lists, torch.iinfo(torch.int32).max).sort(dim=-1).values
    return torch.where(is_entry, ordered, 0)


def state_table(of_keys: Sequence[Tensor], columns: int) -> Tensor:
    """Return the state of each block, from the first four of `BlockLists`: (batch or 1, heads or 1, blocks of queries,
    the first `columns` blocks of keys) uint8."""
    counts, lists, full_counts, full_lists = of_keys
    table = torch.zeros(*counts.shape, columns + 1, dtype=torch.uint8, device=counts.device)
    for count, entries, state in ((counts, lists, PARTIAL), (full_counts, full_lists, FULL)):
        listed = (torch.arange(entries.shape[-1], device=entries.device) < count[..., None]) & (entries < columns)
        table.scatter_(3, torch.where(listed, entries, columns).long(), state)
    return table[..., :columns]


def check_type(block_mask: Any) -> None:
    """Raise unless it is a block mask."""
    names = ("kv_num_blocks", "kv_indices", "BLOCK_SIZE", "mask_mod", "seq_lengths")
    if not all(hasattr(block_mask, name) for name in names):
        raise TypeError(f"block_mask is a {type(block_mask).__name__}, expected what create_block_mask returns")


def check(block_mask: Any, problem: ModProblem) -> None:
    """Raise unless it is a block mask for this problem."""
    check_type(block_mask)
    seqlens, device = (problem.seqlen_q, problem.seqlen_k), problem.device
    counts, lists = block_mask.kv_num_blocks, block_mask.kv_indices
    if counts.ndim != 3 or lists.ndim != 4:
        raise ValueError(
            f"block_mask has kv_indices of {lists.ndim} dimensions, expected 4: (batch, heads, rows, blocks)"
        )
    for axis, (name, size) in enumerate((("batch", problem.batch), ("query heads", problem.heads))):
        if counts.shape[axis] not in (1, size):
            raise ValueError(f"block_mask is for {name} {counts.shape[axis]}, expected 1 or {size}")
    lengths = tuple(block_mask.seq_lengths)
    is_long_enough = all(length >= most for length, most in zip(lengths, seqlens))
    if not is_long_enough or (lengths != seqlens and not problem.packed):
        expected = f"{seqlens[0]} and {seqlens[1]}{' at least, like max_seqlen' if problem.packed else ''}"
        raise ValueError(f"block_mask is for {lengths[0]} queries and {lengths[1]} keys, expected {expected}")
    if counts.device != device:
        raise ValueError(f"block_mask is on {counts.device}, expected {device} like q: call block_mask.to(q.device)")


def mask_mod_of(block_mask: Any) -> Callable[..., Tensor] | None:
    """Return the mask_mod of a block mask; None if it masks nothing in its blocks."""
    function = block_mask.mask_mod
    function = getattr(function, "fn", function) if type(function).__name__ == "_MaskModWrapper" else function
    if getattr(function, "__name__", "") == "noop_mask":
        return None
    if getattr(function, "__name__", "") == "_sliced_mask_mod_error":
        raise ModError("block_mask was sliced, and torch keeps no mask_mod of a slice: make a new one")
    return function
