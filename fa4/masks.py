"""Ready-made mask_mods: functions of (b, h, q_idx, kv_idx), for `create_block_mask` or mask_mod=.

Queries and keys are counted from the start, as in torch's flex_attention (causal=True aligns them at the end).

`causal`, `sliding_window`, `columns`, and what `both` and `either` make of such, have `of_ranges` (`fa4.mods.blocks`):
their block masks are made without asking for every pair.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .mods.blocks import OfRanges
from .mods.call import MaskMod


def _with_ranges(mask: Any, of_ranges: OfRanges) -> MaskMod:
    mask.of_ranges = of_ranges
    return mask


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A query sees the keys up to its own place."""
    return q_idx >= kv_idx


_with_ranges(causal, lambda b, h, first, stop, kv_idx: (kv_idx < stop, kv_idx <= first))


def sliding_window(window: int) -> MaskMod:
    """A query sees its own place and the `window` keys before it."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

    def of_ranges(b: Tensor, h: Tensor, first: int, stop: int, kv_idx: Tensor) -> tuple[Tensor, Tensor]:
        some = (kv_idx < stop) & (kv_idx >= first - window)
        return some, (kv_idx <= first) & (kv_idx >= stop - 1 - window)

    return _with_ranges(mask, of_ranges)


def prefix(lengths: Tensor) -> MaskMod:
    """The first keys of a sequence are seen by all of its queries, the others causally. lengths: (batch,) integers."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < lengths[b]) | (q_idx >= kv_idx)

    return mask


def documents(document: Tensor, of_keys: Tensor | None = None) -> MaskMod:
    """A query sees the keys of its own document. document: (batch, seqlen) integers, or (seqlen,) for every sequence;
    of_keys: the same for the keys, where those are others."""
    of_keys = document if of_keys is None else of_keys
    shared = document.ndim == 1

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if shared:
            return document[q_idx] == of_keys[kv_idx]
        return document[b, q_idx] == of_keys[b, kv_idx]

    return mask


def dilated(window: int, dilation: int) -> MaskMod:
    """A query sees every `dilation`-th key to both sides, `window` of them at most and itself."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = (q_idx - kv_idx).abs()
        return (distance % dilation == 0) & (distance <= window * dilation)

    return mask


def tree(first: Tensor, last: Tensor) -> MaskMod:
    """A node of a tree sees itself and its ancestors, as in the verification of drafted tokens.

    first, last: (nodes,) integers, when a walk through the tree enters and leaves each node: an ancestor is entered
    before, and left after.
    """

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (first[kv_idx] <= first[q_idx]) & (last[q_idx] <= last[kv_idx])

    return mask


def columns(start: Tensor, stop: Tensor) -> MaskMod:
    """Each key is hidden from a range of queries, start[kv] <= q < stop[kv]: an O(N) description of most masks.

    start, stop: (batch, heads, seqlen_k) integers. Source: FlashMask, arXiv 2410.01359.
    """

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx < start[b, h, kv_idx]) | (q_idx >= stop[b, h, kv_idx])

    def of_ranges(b: Tensor, h: Tensor, first: int, last: int, kv_idx: Tensor) -> tuple[Tensor, Tensor]:
        hidden_from, hidden_to = start[b, h, kv_idx], stop[b, h, kv_idx]
        whole = (hidden_from >= last) | (hidden_to <= first) | (hidden_from >= hidden_to)
        return (hidden_from > first) | (hidden_to < last) | whole, whole

    return _with_ranges(mask, of_ranges)


def both(*masks: MaskMod) -> MaskMod:
    """What every one of the masks shows."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = masks[0](b, h, q_idx, kv_idx)
        for other in masks[1:]:
            seen = seen & other(b, h, q_idx, kv_idx)
        return seen

    return _combined(mask, masks, lambda x, y: x & y)


def either(*masks: MaskMod) -> MaskMod:
    """What any one of the masks shows."""

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = masks[0](b, h, q_idx, kv_idx)
        for other in masks[1:]:
            seen = seen | other(b, h, q_idx, kv_idx)
        return seen

    return _combined(mask, masks, lambda x, y: x | y)


def _combined(mask: MaskMod, masks: tuple[MaskMod, ...], combine: Callable[[Tensor, Tensor], Tensor]) -> MaskMod:
    parts: list[OfRanges] = [part.of_ranges for part in masks if hasattr(part, "of_ranges")]
    if len(parts) < len(masks):
        return mask

    def of_ranges(*given: Any) -> tuple[Tensor, Tensor]:
        some, whole = zip(*(part(*given) for part in parts))
        return functools.reduce(combine, some), functools.reduce(combine, whole)

    return _with_ranges(mask, of_ranges)
