"""fa4 in transformers: the attention function and the mask function behind attn_implementation="fa4".

A mask never becomes N x N. The mask function runs once a forward pass and returns one of these, which every layer gets:

* None: causal or full attention of whole sequences, with the layer's own sliding window.
* int32 (1, 1, 4, n), a table of lengths: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k. Padded batches and packed
  position_ids are packed sequences of the rows as they lie; padding is a sequence of its own that nothing reads.
* a `BlockMask` that says all: other kinds of masks, as chunks, images that see themselves whole, or padding amidst.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..api import flash_attn_func, flash_attn_varlen_func
from ..mods.blocks import create_block_mask
from ..scores import bias

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

NAME = "fa4"  # without "flash", which transformers takes for a package to look for


def register_transformers() -> None:
    """Make attn_implementation="fa4" known to transformers: `from_pretrained(..., attn_implementation="fa4")`,
    `from_config` and `model.set_attn_implementation("fa4")`.

    Causal and full attention, padding on either side, packed position_ids, cu_seq_lens of data collators, sliding
    windows, softcap, sinks, grouped queries, and the caches of generate(). Queries that are padding get 0.

    Raises:
        ImportError: transformers is not installed, or too old to take attention functions (below 4.56).
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "fa4.register_transformers() needs transformers, from 4.56, which has AttentionInterface and "
            f"AttentionMaskInterface: {error}"
        ) from error
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


# Attention ------------------------------------------------------------------------------------------------------------


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim); key and value likewise, with their own heads and lengths.
        attention_mask: what `mask` returned, or a mask of the caller: (batch, seqlen_k) of keys that are no padding, or
            one for (batch or 1, heads or 1, seqlen_q, seqlen_k), bool (True is seen) or added to the scores.
        dropout: config.attention_dropout in training, else 0; seeds come from torch's generator.
        sliding_window: keys that a query sees, its own among them.
        s_aux: (heads_q,) the sinks.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: of sequences packed into one row.

    Returns:
        (batch, seqlen_q, heads_q, head_dim_v), and None for the weights, which are never there.

    Raises:
        NotImplementedError: a position bias, or a paged cache.
    """
    for name, given in (("position_bias", position_bias), ("cache (of continuous batching)", cache)):
        if given is not None:
            raise NotImplementedError(f'{name} is given, and attn_implementation="fa4" has none')
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "learnable_sink": s_aux}
    options["dropout_p"] = dropout
    window: dict[str, Any] = {"causal": causal, "window_size": _window(sliding_window, causal)}
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        place = q.shape[1], k.shape[1], k.shape[1] - q.shape[1], 0, _band(sliding_window, causal)
        if causal or sliding_window is None:
            attention_mask = _of_padding(attention_mask, *place, causal)
        else:
            attention_mask = _blocks(q.shape[0], *place, attention_mask.bool(), q.device)
    if attention_mask is not None and not isinstance(attention_mask, Tensor):
        return flash_attn_func(q, k, v, block_mask=attention_mask, **options), None
    if attention_mask is not None and attention_mask.dtype == torch.int32:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = attention_mask[0, 0]
        lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        lengths |= {"seqused_q": seqused_q[:-1], "seqused_k": seqused_k[:-1]}
        # One row may hold one long sequence: its length bounds all.
        return _packed(q, k, v, q.shape[1], k.shape[1], lengths | options | window), None
    if attention_mask is not None:
        return flash_attn_func(q, k, v, **_mods(attention_mask, options)), None
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        lengths = {"cu_seqlens_q": cu_seq_lens_q.int(), "cu_seqlens_k": cu_seq_lens_k.int()}
        return _packed(q, k, v, max_length_q, max_length_k, lengths | options | window), None
    return flash_attn_func(q, k, v, **options, **window), None


def _window(sliding_window: int | None, causal: bool) -> tuple[int | None, int | None]:
    if sliding_window is None:
        return None, None
    return sliding_window - 1, None if causal else sliding_window - 1


def _packed(q: Tensor, k: Tensor, v: Tensor, max_seqlen_q: Any, max_seqlen_k: Any, options: dict[str, Any]) -> Tensor:
    """Attention of rows that lie behind one another: (batch, seqlen_q, heads_q, head_dim_v)."""
    rows = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    out = flash_attn_varlen_func(*rows, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **options)
    return out.unflatten(0, q.shape[:2])


def _mods(values: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """The options with a mask of the caller's, one value a pair."""
    shared = [extent == 1 for extent in values.shape]
    if values.dtype == torch.bool:

        def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            indices = (0 if one else i for one, i in zip(shared, (b, h, q_idx, kv_idx)))
            return values[tuple(indices)]

        return options | {"mask_mod": mask_mod}
    added, cap = bias(values), options["softcap"]
    if not cap:
        return options | {"score_mod": added}

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return added(cap * torch.tanh(score / cap), b, h, q_idx, kv_idx)

    return options | {"score_mod": score_mod, "softcap": 0.0}


# Masks ----------------------------------------------------------------------------------------------------------------


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **_others: Any,
) -> Tensor | BlockMask | None:
    """What transformers calls once for each kind of layer, and hands to `attention`.

    Args:
        q_offset, kv_offset: the positions of the first query and of the first key.
        mask_function: which pairs of positions are seen, padding aside.
        attention_mask: (batch, positions) which positions are no padding; None is all.
        device: where a result lies.
    """
    parts = set(_parts(mask_function))
    if not parts <= _KNOWN:
        there = None if attention_mask is None else _keys(attention_mask, kv_length, kv_offset)
        return _blocks(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, there, device)
    if _PACKED in parts:
        return _table_of_packed(_segments(mask_function))
    causal = _CAUSAL in parts
    if attention_mask is None:
        if _reaches_all(q_length, kv_length, q_offset, kv_offset, causal):
            return None
        attention_mask = torch.ones(batch_size, 1, dtype=torch.bool, device=device).expand(-1, kv_length)
    return _of_padding(attention_mask, q_length, kv_length, q_offset, kv_offset, mask_function, causal)


def _reaches_all(q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int | Tensor, causal: bool) -> bool:
    """Whether the last query stands at the last key: else those behind it are a cache's, unset."""
    if isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor):
        return False
    return not causal or q_offset + q_length == kv_offset + kv_length


def _of_padding(
    attention_mask: Tensor,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    function: Callable[..., Tensor],
    causal: bool,
) -> Tensor | BlockMask | None:
    """The mask of a batch with padding; `function` tells which pairs of positions are seen apart from it."""
    there = _keys(attention_mask, kv_length, kv_offset)
    if not torch.compiler.is_compiling():  # compiled code cannot look: it takes each row for one run of keys
        if _reaches_all(q_length, kv_length, q_offset, kv_offset, causal) and bool(there.all()):
            return None
        if bool((there[:, 0].int() + (there[:, 1:] & ~there[:, :-1]).sum(1) > 1).any()):
            return _blocks(there.shape[0], q_length, kv_length, q_offset, kv_offset, function, there, there.device)
    return _table_of_runs(there, q_length, q_offset - kv_offset, causal)


_CAUSAL = "causal_mask_function"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
# Parts of mask functions that the arguments of `attention` say too. Any other makes a BlockMask, as right and slower.
_KNOWN = {
    _CAUSAL,
    "sliding_window_overlay.<locals>.inner_mask",
    "bidirectional_mask_function",
    _PACKED,
}
_JOINED = {
    "and_masks.<locals>.and_mask": "mask_functions",
    "remap_positions_for_packed_sequence.<locals>.inner_mask": "mask_function",
}


def _parts(function: Callable[..., Any]) -> Iterator[str]:
    """The names of the functions that transformers made a mask function of."""
    name = getattr(function, "__qualname__", repr(function))
    if not getattr(function, "__module__", "").startswith("transformers.") or name not in _JOINED:
        yield name if getattr(function, "__module__", "").startswith("transformers.") else repr(function)
        return
    inside = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))[_JOINED[name]].cell_contents
    for part in inside if isinstance(inside, tuple) else (inside,):
        yield from _parts(part)


def _keys(there: Tensor, kv_length: int, kv_offset: int | Tensor) -> Tensor:
    """(batch, kv_length): which keys are no padding. Positions that the mask does not reach are not there."""
    positions = torch.arange(kv_length, device=there.device) + kv_offset
    return there.bool()[:, positions.clamp(max=there.shape[1] - 1)] & (positions < there.shape[1])


def _table_of_runs(there: Tensor, q_length: int, shift: int | Tensor, causal: bool) -> Tensor:
    """The lengths of a batch with one run of keys a row; `shift` is the key that query 0 stands at."""
    batch, kv_length = there.shape
    start, stop = there.int().argmax(1), there.sum(1)
    stop = start + stop
    first, end = torch.zeros_like(start), torch.full_like(start, q_length)
    if causal:  # queries that are padding go, so that the last query stands at the last key
        stop = torch.clamp(stop, max=shift + q_length)
        start = torch.minimum(start, stop)
        first, end = (start - shift).clamp(0, q_length), (stop - shift).clamp(0, q_length)
    rows = torch.arange(batch, device=there.device)
    sides = ((q_length, first, end), (kv_length, start, stop))
    # Of each row two sequences: what lies before the run, unused, and the run with what lies behind it.
    bounds = [torch.stack((rows * n, rows * n + a), 1).flatten() for n, a, _ in sides]
    bounds = [torch.nn.functional.pad(x, (0, 1), value=batch * n) for x, (n, _, _) in zip(bounds, sides)]
    used = [torch.stack((torch.zeros_like(a), b - a), 1).flatten() for _, a, b in sides]
    used = [torch.nn.functional.pad(x, (0, 1)) for x in used]
    return torch.stack((*bounds, *used)).to(torch.int32)[None, None]


def _table_of_packed(segments: Tensor) -> Tensor:
    """The lengths of sequences packed into the rows of a batch: (batch, length), which one each position belongs to."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    bounds = torch.nn.functional.pad(starts.flatten().nonzero().flatten(), (0, 1), value=segments.numel())
    used = torch.nn.functional.pad(bounds.diff(), (0, 1))
    return torch.stack((bounds, bounds, used, used)).to(torch.int32)[None, None]


def _segments(function: Callable[..., Any]) -> Tensor:
    """(batch, length): which sequence each position belongs to, as transformers found it in position_ids."""
    inside = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    if function.__qualname__ == _PACKED:
        return inside["packed_sequence_mask"].cell_contents
    for part in inside[_JOINED[function.__qualname__]].cell_contents:
        if _PACKED in _parts(part):
            return _segments(part)
    raise AssertionError("mask functions of packed sequences hold what the sequences are")


def _blocks(
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    function: Callable[..., Tensor],
    there: Tensor | None,
    device: torch.device | str,
) -> BlockMask:
    """Any mask, as a BlockMask. `there` tells which keys are no padding."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = function(b, h, q_idx + q_offset, kv_idx + kv_offset)
        return seen if there is None else seen & there[b, kv_idx]

    return create_block_mask(mask_mod, batch, None, q_length, kv_length, device=device)


def _band(sliding_window: int | None, causal: bool) -> Callable[..., Tensor]:
    """What `attention` sees of positions without a mask."""
    left, right = _window(sliding_window, causal)
    right = 0 if causal else right

    def function(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = kv_idx >= 0
        seen = seen if left is None else seen & (kv_idx >= q_idx - left)
        return seen if right is None else seen & (kv_idx <= q_idx + right)

    return function
