"""Calls with a score_mod, mask_mod, block_mask or dropout: their `Mods`, and the caches of such calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..mods.frontend import blocks, coarse, trace_cache
from ..mods.frontend.blocks import ModProblem
from ..mods.frontend.call import MaskMod, ScoreMod, gather
from ..mods.frontend.problem import indexed
from ..mods.ir.graph import parse
from ..mods.ir.record import Mods
from ..runtime.device import chip_of
from ..runtime.spec import AttentionInputs, Flags
from ..runtime.torch_internals import is_transformed
from .signature import CallCache


def prepare(
    inputs: AttentionInputs,
    flags: Flags,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    block_mask: Any,
    dropout: tuple[float, Tensor | None] = (0.0, None),
) -> tuple[Mods, Flags]:
    """Return a call's functions, block mask and dropout (p, seed and offset) as its `Mods`, and the matching flags.

    Raises:
        TypeError, ValueError: they do not fit the call, or cannot be traced.
        NotImplementedError: inside a transform of torch.func.
    """
    if not torch.compiler.is_compiling() and is_transformed():
        raise NotImplementedError(
            "score_mod, mask_mod, block_mask and dropout_p do not work inside transforms of torch.func"
        )
    if score_mod is not None and flags.softcap:
        raise ValueError("softcap and score_mod are both given, expected one: fa4.scores.softcap is a score_mod")
    if block_mask is not None and (flags.window_left is not None or flags.window_right is not None):
        raise ValueError("block_mask is given with causal or window_size, expected these in its mask_mod")
    *_, max_seqlen_q, max_seqlen_k = inputs
    heads, packed = inputs.q.shape[-2], inputs.q.ndim == 3
    problem = ModProblem(inputs.batch, heads, max_seqlen_q, max_seqlen_k, inputs.q.device, packed)
    mods = gather(problem, score_mod, mask_mod, block_mask, flags.needs_backward)
    mods = mods._replace(dropout_p=dropout[0], dropout_seed=dropout[1])
    # (Compiled code cannot extend graphs: there such blocks stay as they are.)
    if mods.blocks and not torch.compiler.is_compiling() and coarse.needs_tiling((mods.block_q, mods.block_k)):  # noqa: SIM102
        if flags.backend != "torch" and chip_of(inputs.q.device).compiles:
            mods = coarse.in_tiles(mods, block_mask.seq_lengths)
    return mods, flags._replace(needs_backward=flags.needs_backward or bool(mods.trained))


def visited(mods: Mods) -> float | None:
    """Return the fraction of blocks that a block mask lists; None without one, or without its values."""
    if not mods.blocks or mods.blocks[0].is_meta:
        return None
    counts, lists, full_counts = mods.blocks[:3]
    return int((counts + full_counts).sum()) / (counts.numel() * lists.shape[-1])


def bounded(block_mask: Any, inputs: AttentionInputs, given: Sequence[Any]) -> AttentionInputs:
    """Bound packed sequences by the lengths of their block mask. given: the caller's max_seqlen_q and max_seqlen_k,
    which take precedence if the host can read them."""
    blocks.check_type(block_mask)
    return _bounded(block_mask.seq_lengths, inputs, given)


def _bounded(seqlens: Sequence[int], inputs: AttentionInputs, given: Sequence[Any]) -> AttentionInputs:
    def bound(value: Any, most: int, length: int) -> int:
        is_unknown = value is None or (isinstance(value, Tensor) and value.device.type != "cpu")
        return min(most, length) if is_unknown else most

    per_side = zip(given, inputs.max_seqlens, seqlens)
    max_seqlen_q, max_seqlen_k = (bound(*of_side) for of_side in per_side)
    return inputs._replace(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)


class Limits(NamedTuple):
    """Limits of the packed sequences, or growing caches, for which a call's checked functions and block mask are valid.

    most_sequences, most_keys: entries that captured tensors have for sequences, and for a cache's keys. batch:
    sequences that the block lists cover. seqlens: maximum lengths of the block mask. None: no such limit.
    """

    most_sequences: int | None
    most_keys: int | None
    batch: int | None = None
    seqlens: tuple[int, int] | None = None

    @classmethod
    def of(cls, mods: Mods, block_mask: Any = None) -> Limits:
        entries: dict[str, int] = {}
        for text, of in ((mods.score, mods.score_values), (mods.mask, mods.mask_values)):
            for load, axis, name in indexed(parse(text)) if text else ():
                size = of()[0][load].shape[axis]
                entries[name] = min(size, entries.get(name, size))
        batch, seqlens = None, None
        if block_mask is not None:
            batch, seqlens = block_mask.kv_num_blocks.shape[0], tuple(block_mask.seq_lengths)
        return cls(entries.get("b"), entries.get("kv_idx"), None if batch == 1 else batch, seqlens)

    def within(self, inputs: AttentionInputs, given: Sequence[Any]) -> AttentionInputs | None:
        """Return packed inputs, bounded by their block mask where the caller's bounds (given) are None; None beyond
        these limits."""
        if self.seqlens is not None:
            inputs = _bounded(self.seqlens, inputs, given)
            if inputs.max_seqlen_q > self.seqlens[0] or inputs.max_seqlen_k > self.seqlens[1]:
                return None
        return inputs if self.has(inputs.batch) else None

    def has(self, sequences: int, keys: int = 0) -> bool:
        """Whether this number of sequences, and of a cache's keys, is within the limits."""
        return (
            (self.most_sequences is None or sequences <= self.most_sequences)
            and (self.most_keys is None or keys <= self.most_keys)
            and (self.batch is None or sequences == self.batch)
        )


def keep(score_mod: ScoreMod | None, mask_mod: MaskMod | None, block_mask: Any) -> CallCache | None:
    """Create a call cache for these three objects, of a checked call, if their changes can be detected."""
    masks = mask_mod if block_mask is None else blocks.mask_mod_of(block_mask)
    functions = [function for function in (score_mod, masks) if function is not None]
    calls: CallCache[Any] = CallCache()
    return calls if trace_cache.keep(score_mod, mask_mod, block_mask, functions, calls) else None
