"""Nested tensors of torch's jagged layout, (batch, lengths, heads, head_dim), as packed sequences.

torch's own operators on nested tensors, which autograd supports, pack and unpack them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nested import nested_tensor_from_jagged
from torch.nn import functional

from ..mods.frontend import blocks
from .checks import checks_lengths


def is_jagged(tensors: tuple) -> bool:
    """Whether q, k or v (the first tensors) is jagged."""
    return any(getattr(x, "layout", None) is torch.jagged for x in tensors[:3])


def packed(tensors: tuple) -> tuple[tuple, tuple]:
    """Convert the tensors of a call on jagged q, k and v, fields of `AttentionInputs`, to those of a packed call, and
    return them with its max_seqlens."""
    q, k, v, sink, *_, seqused_k = tensors
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.layout is not torch.jagged:
            actual = f"has layout {x.layout}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
            raise TypeError(f"{name} {actual}, expected torch.jagged: q, k and v are all nested, or none is")
        if x.ndim != 4 or getattr(x, "_ragged_idx", 1) != 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected (batch, lengths, heads, head_dim)")
    if seqused_k is not None:
        raise TypeError("seqused_k came with a nested k, expected None: its lengths say what is used")
    check_same_lengths("k", k, "v", v)
    has_holes = q.lengths() is not None or k.lengths() is not None
    bounds, used, longest = zip(*(_lengths(x, has_holes) for x in (q, k)))
    return (q.values(), k.values(), v.values(), sink, *bounds, *used), longest


def check_same_lengths(name_k: str, k: Any, name_v: str, v: Any) -> None:
    """Raise unless jagged k and v share their lengths."""
    if v.offsets() is not k.offsets() or v.lengths() is not k.lengths():
        raise ValueError(
            f"{name_v} has lengths of its own, expected {name_k}'s: make it by "
            f"torch.nested.nested_tensor_from_jagged(values, {name_k}.offsets(), {name_k}.lengths())"
        )


def packed_mods(tensors: tuple, mods: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Convert score_mod, mask_mod and block_mask of a call that `packed` accepted: in tensors with holes, sequence b is
    packed sequence b + 1."""
    q, k = tensors[:2]
    if q.lengths() is None and k.lengths() is None:
        return mods
    score_mod, mask_mod, block_mask = mods
    if block_mask is not None:
        blocks.check_type(block_mask)
        for name, x, length in zip(("q", "k"), (q, k), block_mask.seq_lengths):
            _check_longest(name, x, length)
        block_mask = _next_sequence_blocks(block_mask, (q.values().shape[0], k.values().shape[0]))
    return score_mod and _next_sequence_score(score_mod), mask_mod and _next_sequence_mask(mask_mod), block_mask


def _next_sequence_score(score_mod: Callable) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: score_mod(score, b - 1, h, q_idx, kv_idx)


def _next_sequence_mask(mask_mod: Callable) -> Callable:
    return lambda b, h, q_idx, kv_idx: mask_mod(b - 1, h, q_idx, kv_idx)


def _check_longest(name: str, x: Any, length: int) -> None:
    """Raise if a sequence has more rows than a block mask covers, where reading is free."""
    used = x.offsets().diff() if x.lengths() is None else x.lengths()
    if checks_lengths(x.device.type) and used.numel() and int(used.max()) > length:
        raise ValueError(f"block_mask is for {length} rows of {name}, expected {int(used.max())}, its longest sequence")


def _next_sequence_blocks(block_mask: Any, rows: tuple[int, int]) -> Any:
    """Extend a block mask for packed sequences of up to all `rows` of q and k: rows in holes count as rows of a
    sequence, but are masked."""
    from torch.nn.attention.flex_attention import BlockMask

    rows_q, rows_k = map(max, rows, block_mask.seq_lengths)
    blocks_q, blocks_k = -(-rows_q // block_mask.BLOCK_SIZE[0]), -(-rows_k // block_mask.BLOCK_SIZE[1])

    def padded(x: Tensor | None) -> Any:
        if x is None:
            return None
        last = (0, blocks_k - x.shape[3]) if x.ndim == 4 else ()
        first = 1 if x.shape[0] > 1 else 0  # the extra first sequence, without keys
        return functional.pad(x, (*last, 0, blocks_q - x.shape[2], 0, 0, first, 0))

    counts, lists, full_counts, full_lists = (padded(getattr(block_mask, name)) for name in blocks.KEY_FIELDS)
    mask_mod = blocks.mask_mod_of(block_mask)
    sizes = {"BLOCK_SIZE": block_mask.BLOCK_SIZE, "seq_lengths": (rows_q, rows_k)}
    packed_mask = block_mask.mask_mod if mask_mod is None else _next_sequence_mask(mask_mod)
    return BlockMask.from_kv_blocks(counts, lists, full_counts, full_lists, mask_mod=packed_mask, **sizes)


def nested(out: Tensor, lse: Tensor, q: Any) -> tuple[Tensor, Tensor]:
    """Convert packed out and lse to nested (batch, lengths, heads, head_dim_v) and (batch, heads, lengths), like q."""
    like = {"offsets": q.offsets(), "lengths": q.lengths()}
    return nested_tensor_from_jagged(out, **like), nested_tensor_from_jagged(lse, **like, jagged_dim=2)


def _lengths(x: Any, has_holes: bool) -> tuple[Tensor, Tensor | None, int | None]:
    """Return cu_seqlens, seqused and max_seqlen (None if unknown: reading would synchronise). A tensor with holes, as
    from `torch.nested.narrow`, may begin with one: its first rows become a sequence that uses no rows."""
    bounds = x.offsets().to(torch.int32)
    if not has_holes:
        return bounds, None, getattr(x, "_maybe_max_seqlen", None)
    used = bounds.diff() if x.lengths() is None else x.lengths().to(torch.int32)
    return functional.pad(bounds, (1, 0)), functional.pad(used, (1, 0)), None
