"""Which keys each query attends to: from lists of key blocks to lists of key rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """How a list of blocks selects keys.

    granularity: keys of a block. causal: keys after a query's own position are not selected. window: a query attends
    also to its own position and to so many keys before it; None for no window.
    """

    granularity: int
    causal: bool
    window: int | None

    def width(self, blocks: int) -> int:
        """Return the largest number of keys that a list of so many blocks gives a query."""
        return blocks * self.granularity + (0 if self.window is None else self.window + 1)


class Layout(NamedTuple):
    """Where queries and keys of sequences are. queries, keys: of the longest sequence. The tensors are those of
    `sparse_attention`. page_size: rows of a page; None without page_table."""

    batch: int
    queries: int
    keys: int
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_k: Tensor | None = None
    page_table: Tensor | None = None
    page_size: int | None = None


class Places(NamedTuple):
    """Where the keys of each query are. All (tokens,) int64, on q's device, of the flattened queries.

    sequence: of the query; that of a query past the last sequence is any. query: number in its sequence. position: the
    same, counted as the keys are, so that the last query is at the last key. end: number of the sequence's keys. base:
    row of its first key in the flattened k; 0 with a page table.
    """

    sequence: Tensor
    query: Tensor
    position: Tensor
    end: Tensor
    base: Tensor

    @staticmethod
    def of(layout: Layout, first: int, stop: int, device: torch.device) -> Places:
        """Return the places of the queries `first` to `stop` - 1."""
        token = torch.arange(first, stop, device=device)
        if layout.cu_seqlens_q is None:
            sequence, query = token // max(layout.queries, 1), token % max(layout.queries, 1)
            queries: Tensor | int = layout.queries
            is_used = torch.ones_like(token, dtype=torch.bool)
        else:
            starts = layout.cu_seqlens_q.long()
            sequence = torch.searchsorted(starts[1:], token, right=True)
            is_used, sequence = sequence < layout.batch, sequence.clamp(max=layout.batch - 1)
            query, queries = token - starts[sequence], starts[sequence + 1] - starts[sequence]
        base = torch.zeros_like(token) if layout.page_table is not None else sequence * layout.keys
        end = torch.full_like(token, layout.keys)
        if layout.cu_seqlens_k is not None:
            bounds = layout.cu_seqlens_k.long()
            base, end = bounds[sequence], bounds[sequence + 1] - bounds[sequence]
        if layout.seqused_k is not None:
            end = layout.seqused_k.long()[sequence]
        end = torch.where(is_used, end, 0)  # queries past the last sequence have no keys
        return Places(sequence, query, query + end - queries, end, base)


def selected_rows(
    indices: Tensor, counts: Tensor | None, places: Places, rule: Rule, keep: int
) -> tuple[Tensor, Tensor]:
    """Return the keys of each list as rows of its sequence, and their number.

    Args:
        indices: (tokens, lists, blocks), -1 for none. counts: (tokens, lists), blocks of a list that are read.
        keep: at least the largest number of keys that a query attends to.

    Returns:
        rows (tokens, lists, keep) int32: ascending, each once; 0 from the second result on.
        count (tokens, lists) int32.
    """
    position, end = places.position[:, None, None], places.end[:, None, None]
    blocks = indices.long()[..., None]
    rows = (blocks * rule.granularity + torch.arange(rule.granularity, device=indices.device)).flatten(2)
    is_listed = blocks >= 0
    if counts is not None:
        is_listed = is_listed & (torch.arange(indices.shape[2], device=indices.device) < counts[..., None])[..., None]
    is_kept = is_listed.expand(*indices.shape, rule.granularity).flatten(2) & (rows < end)
    if rule.causal:
        is_kept = is_kept & (rows <= position)
    if rule.window is not None:
        near = position - torch.arange(rule.window, -1, -1, device=indices.device)
        near = near.expand(*indices.shape[:2], rule.window + 1)
        rows, is_kept = torch.cat((rows, near), 2), torch.cat((is_kept, (near >= 0) & (near < end)), 2)
    none = torch.iinfo(rows.dtype).max
    rows = torch.where(is_kept, rows, none).sort(2).values
    is_kept = rows != none
    is_kept[..., 1:] &= rows[..., 1:] != rows[..., :-1]
    slots = torch.where(is_kept, is_kept.cumsum(2) - 1, keep)
    packed = rows.new_zeros(*rows.shape[:2], keep + 1, dtype=torch.int32)
    packed.scatter_(2, slots, rows.int())
    return packed[..., :keep], is_kept.sum(2).int()


def in_memory(rows: Tensor, places: Places, layout: Layout) -> Tensor:
    """Return where rows of sequences are in the flattened k."""
    size, table = layout.page_size, layout.page_table
    if size is None or table is None or not table.shape[1]:
        return rows + places.base[:, None, None].int()
    page = (rows // size).clamp(max=table.shape[1] - 1).long()
    return table[places.sequence[:, None, None].expand_as(page), page] * size + rows % size
