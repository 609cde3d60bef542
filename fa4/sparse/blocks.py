"""Lists of key blocks for blocks of queries, as a block mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..mods.frontend.blocks import FULL, IS_ASCENDING, PARTIAL, listed
from .selection import Rule


def block_mask(
    indices: Tensor,
    counts: Tensor | None,
    rule: Rule,
    heads: int,
    longest: tuple[int, int],
    shift: Tensor | int,
    needs_backward: bool,
) -> Any:
    """Return the block mask of the lists.

    Args:
        indices: (batch, blocks of queries, lists, blocks), counts: (batch, blocks of queries, lists).
        heads: query heads. longest: queries and keys of the longest sequences.
        needs_backward: whether the lists of keys are needed, too.
        shift: position of a sequence's first query among its keys; a tensor has one for each sequence, (batch,) int32.
    """
    from torch.nn.attention.flex_attention import BlockMask, noop_mask

    size = rule.granularity
    batch, queries, lists, blocks = indices.shape
    columns = -(-longest[1] // size)
    if counts is not None:
        is_listed = torch.arange(blocks, device=indices.device) < counts[..., None]
        indices = torch.where(is_listed, indices, -1)
    # Blocks that are not there go to a column before the first or after the last one.
    chosen = indices.clamp(-1, columns).long() + 1
    table = torch.zeros(batch, queries, lists, columns + 2, dtype=torch.uint8, device=indices.device)
    table = table.scatter_(3, chosen, FULL)[..., 1:-1].transpose(1, 2)
    is_chosen = table == FULL if rule.causal and rule.window is not None else table
    if rule.causal or rule.window is not None:
        # How many keys the first one of a block comes before the first query: (batch or 1, 1, queries, columns).
        first, key = (torch.arange(0, n * size, size, device=indices.device) for n in (queries, columns))
        before = (first[:, None] - key)[None, None] + _for_tables(shift)
    if rule.causal:
        # 2: keys of a block come before its queries. 0: they come after.
        most = (before > -size).to(torch.uint8) + (before >= size - 1)
        table = torch.minimum(table, most)
    if rule.window is not None:
        is_near = (before > -size) & (before < size + rule.window)
        table = torch.where((table == 0) & is_near, PARTIAL, table)
    # Lists for all heads have one head.
    of_heads = table if lists == 1 else table.repeat_interleave(heads // lists, 1)
    names = ("num_blocks", "indices")
    of_queries: tuple[Tensor | None, ...] = (None,) * 4
    if needs_backward:
        of_queries = listed(of_heads.transpose(2, 3))
    # torch's own `from_kv_blocks` finds the lists of keys by way of tables for each head, which takes a millisecond.
    named = {
        f"{kind}{side}_{name}": x
        for side, of_side in (("kv", listed(of_heads)), ("q", of_queries))
        for (kind, name), x in zip(itertools.product(("", "full_"), names), of_side)
    }
    mask_mod = _within(rule, shift, is_chosen, heads // lists) or noop_mask
    mask = BlockMask(longest, **named, BLOCK_SIZE=(size, size), mask_mod=mask_mod)
    if not torch.compiler.is_compiling():
        setattr(mask, IS_ASCENDING, True)
    return mask


def _for_tables(shift: Tensor | int) -> Tensor | int:
    return shift[:, None, None, None] if isinstance(shift, Tensor) else shift


def _within(rule: Rule, shift: Tensor | int, is_chosen: Tensor, group: int) -> Callable[..., Tensor] | None:
    """Return what a query attends to in a partial block."""
    window, size = rule.window, rule.granularity
    if window is None and not rule.causal:
        return None

    def distance(b: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx + (shift[b] if isinstance(shift, Tensor) else shift)

    def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return distance(b, q_idx, kv_idx) >= 0

    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        before = distance(b, q_idx, kv_idx)
        return (before >= 0) & (before <= window)

    def causal_or_near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        before = distance(b, q_idx, kv_idx)
        return (before >= 0) & ((before <= window) | is_chosen[b, h // group, q_idx // size, kv_idx // size])

    return causal if window is None else causal_or_near if rule.causal else near
