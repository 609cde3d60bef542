"""Ready-made mask_mods: functions of (b, h, q_idx, kv_idx), for `create_block_mask` or mask_mod=.

Queries and keys are counted from the start, as in torch's flex_attention (causal=True aligns them at the end).

`causal`, `sliding_window`, `columns`, and combinations of these by `both` and `either` have `of_ranges`
(`fa4.mods.frontend.blocks`): their block masks need no evaluation of every pair.

They are values (`fa4.mods.ir.ready`): equal ones compare equal, and they can be pickled, copied and stored in modules.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from torch import Tensor

from .mods.frontend.blocks import OfRanges
from .mods.frontend.call import MaskMod
from .mods.ir.ready import ReadyMade, check_whole


def causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A query attends to the keys up to its own position."""
    return q_idx >= kv_idx


causal.of_ranges = lambda b, h, first, stop, kv_idx: (kv_idx < stop, kv_idx <= first)  # type: ignore[attr-defined]


class sliding_window(ReadyMade):
    """A query attends to its own position and the `window` keys before it."""

    window: int

    def __init__(self, window: int) -> None:
        check_whole("window", window, 0)
        super().__init__(int(window))

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= self.window)

    def of_ranges(self, b: Tensor, h: Tensor, first: int, stop: int, kv_idx: Tensor) -> tuple[Tensor, Tensor]:
        some = (kv_idx < stop) & (kv_idx >= first - self.window)
        return some, (kv_idx <= first) & (kv_idx >= stop - 1 - self.window)


class prefix(ReadyMade):
    """All queries of a sequence attend to its first keys, and causally to the others. lengths: (batch,) integers."""

    lengths: Tensor

    def __init__(self, lengths: Tensor) -> None:
        self._keep_tensors("batch", lengths, integer=True)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx < self.lengths[b]) | (q_idx >= kv_idx)


class documents(ReadyMade):
    """A query attends to the keys of its own document. document: (batch, seqlen) integers, or (seqlen,) for every
    sequence; of_keys: the same for the keys, if they differ."""

    document: Tensor
    of_keys: Tensor

    def __init__(self, document: Tensor, of_keys: Tensor | None = None) -> None:
        of_keys = document if of_keys is None else of_keys
        axes = "seqlen" if isinstance(document, Tensor) and document.ndim == 1 else "batch, seqlen"
        self._keep_tensors(axes, document, of_keys, integer=True)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        if self.document.ndim == 1:
            return self.document[q_idx] == self.of_keys[kv_idx]
        return self.document[b, q_idx] == self.of_keys[b, kv_idx]


class dilated(ReadyMade):
    """A query attends to itself and to every `dilation`-th key on both sides, at most `window` per side."""

    window: int
    dilation: int

    def __init__(self, window: int, dilation: int) -> None:
        check_whole("window", window, 0)
        check_whole("dilation", dilation, 1)
        super().__init__(int(window), int(dilation))

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = (q_idx - kv_idx).abs()
        return (distance % self.dilation == 0) & (distance <= self.window * self.dilation)


class tree(ReadyMade):
    """A node of a tree attends to itself and its ancestors, as in the verification of drafted tokens.

    first, last: (nodes,) integers, the times at which a depth-first traversal enters and leaves each node: an ancestor
    is entered earlier and left later.
    """

    first: Tensor
    last: Tensor

    def __init__(self, first: Tensor, last: Tensor) -> None:
        self._keep_tensors("nodes", first, last, integer=True)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (self.first[kv_idx] <= self.first[q_idx]) & (self.last[q_idx] <= self.last[kv_idx])


class columns(ReadyMade):
    """Each key is masked for a range of queries, start[kv] <= q < stop[kv]: an O(N) description of most masks.

    start, stop: (batch, heads, seqlen_k) integers. Source: FlashMask, arXiv 2410.01359.
    """

    start: Tensor
    stop: Tensor

    def __init__(self, start: Tensor, stop: Tensor) -> None:
        self._keep_tensors("batch, heads, seqlen_k", start, stop, integer=True)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx < self.start[b, h, kv_idx]) | (q_idx >= self.stop[b, h, kv_idx])

    def of_ranges(self, b: Tensor, h: Tensor, first: int, last: int, kv_idx: Tensor) -> tuple[Tensor, Tensor]:
        masked_from, masked_to = self.start[b, h, kv_idx], self.stop[b, h, kv_idx]
        whole = (masked_from >= last) | (masked_to <= first) | (masked_from >= masked_to)
        return (masked_from > first) | (masked_to < last) | whole, whole


class _Combined(ReadyMade):
    """Combine the results of masks by an operator. It has `of_ranges` if all masks have it."""

    masks: tuple[MaskMod, ...]
    combine = staticmethod(operator.and_)

    def __init__(self, *masks: MaskMod) -> None:
        name = type(self).__name__
        if not masks:
            raise ValueError(f"{name}() has no masks, expected one at least")
        for i, mask in enumerate(masks):
            if not callable(mask):
                expected = "expected a function (b, h, q_idx, kv_idx)"
                raise TypeError(f"mask {i} of {name} is a {type(mask).__name__}, {expected}")
        super().__init__(masks)

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return functools.reduce(self.combine, [mask(b, h, q_idx, kv_idx) for mask in self.masks])

    @property
    def of_ranges(self) -> OfRanges | None:
        parts: list[Any] = [getattr(mask, "of_ranges", None) for mask in self.masks]
        if None in parts:
            return None

        def of_ranges(*given: Any) -> tuple[Tensor, Tensor]:
            some, whole = zip(*(part(*given) for part in parts))
            return functools.reduce(self.combine, some), functools.reduce(self.combine, whole)

        return of_ranges


class both(_Combined):
    """Intersection of masks."""


class either(_Combined):
    """Union of masks."""

    combine = staticmethod(operator.or_)
