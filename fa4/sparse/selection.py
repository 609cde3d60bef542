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


class Places(NamedTuple):
    """Where the keys of each query are. All (tokens,) int64, on q's device, of the flattened queries.

    sequence: of the query; that of a query past the last sequence is any. position: in its sequence, counted as the
    keys are, so that the last query is at the last key. end: number of the sequence's keys. base: row of its first key
    in the flattened k; 0 with a page table.
    """

    sequence: Tensor
    position: Tensor
    end: Tensor
    base: Tensor

    def part(self, first: int, stop: int) -> Places:
        return Places(*(x[first:stop] for x in self))


def dense_places(batch: int, seqlen_q: int, seqlen_k: int, seqused_k: Tensor | None, device: torch.device) -> Places:
    """Return the places of padded queries."""
    sequence, query = (
        torch.arange(batch, device=device).repeat_interleave(seqlen_q),
        torch.arange(seqlen_q, device=device).repeat(batch),
    )
    end = torch.full_like(sequence, seqlen_k) if seqused_k is None else seqused_k.long()[sequence]
    return Places(sequence, query + end - seqlen_q, end, sequence * seqlen_k)


def packed_places(total_q: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None) -> Places:
    """Return the places of packed queries, whose keys are packed, or in pages."""
    query = torch.arange(total_q, device=cu_seqlens_q.device)
    starts = cu_seqlens_q.long()
    batch = starts.shape[0] - 1
    sequence = torch.searchsorted(starts[1:], query, right=True)
    following, known = (sequence + 1).clamp(max=batch), sequence.clamp(max=max(batch - 1, 0))
    if cu_seqlens_k is not None:
        ends = cu_seqlens_k.long()
        base, end = ends[sequence], ends[following] - ends[sequence]
    else:
        assert seqused_k is not None
        end = seqused_k.long()[known] if batch else torch.zeros_like(query)
        base = torch.zeros_like(query)
    end = torch.where(sequence < batch, end, 0)  # queries past the last sequence have no keys
    return Places(known, query - starts[following] + end, end, base)


def selected_rows(
    indices: Tensor, counts: Tensor | None, places: Places, rule: Rule, keep: int
) -> tuple[Tensor, Tensor]:
    """Return the keys of each list as rows of its sequence, and their number.

    Args:
        indices: (tokens, lists, blocks), -1 for none. counts: (tokens, lists), blocks of a list that are read.
        keep: at least the largest number of keys that a query attends to.

    Returns:
        rows (tokens, lists, keep) int32: in the order of the list, then the window; 0 from the second result on.
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
        is_kept = is_kept & ((rows > position) | (rows < position - rule.window))
        near = near.expand(*indices.shape[:2], rule.window + 1)
        rows, is_kept = torch.cat((rows, near), 2), torch.cat((is_kept, (near >= 0) & (near < end)), 2)
    slots = torch.where(is_kept, is_kept.cumsum(2) - 1, keep).clamp(
        max=keep
    )  # (of lists with duplicates, too, if many)
    packed = rows.new_zeros(*rows.shape[:2], keep + 1, dtype=torch.int32)
    packed.scatter_(2, slots, rows.int())
    return packed[..., :keep], is_kept.sum(2).clamp(max=keep).int()


def in_memory(rows: Tensor, places: Places, page_table: Tensor | None, page_size: int) -> Tensor:
    """Return where rows of sequences are in the flattened k."""
    if page_table is None:
        return rows + places.base[:, None, None].int()
    if not page_table.shape[1]:
        return rows
    page = (rows // page_size).clamp(max=page_table.shape[1] - 1).long()
    pages = page_table[places.sequence[:, None, None].expand_as(page), page]
    return pages * page_size + rows % page_size
