"""fa4 in transformers: the attention function and the mask function behind attn_implementation="fa4".

No mask is an N x N matrix. The mask function runs once per forward pass and returns one of these to every layer:

* None: causal or full attention of whole sequences, with the layer's own sliding window.
* A table of lengths, int32 with four axes (see `documents`): padded batches and packed position_ids, as packed
  sequences without moving rows.
* A complete `BlockMask`: other masks, such as chunks, bidirectional images, or padding between tokens.

transformers checks for packed position_ids only without a cache and without a mask, and some models do not pass it
their position_ids. So the layers check them too, once for all layers, as transformers' flash_attention_2 does.

Compiled code cannot read values. There `torch.ops.fa4.documents` finds documents at run time, unless the model makes
the positions itself by torch.arange: then no row is packed, and position_ids are ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..api.dense import flash_attn_func, flash_attn_varlen_func
from ..runtime.torch_internals import has_values
from ..scores import bias
from . import documents
from .documents import PackedLengths

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

NAME = "fa4"  # without "flash": transformers would look for a package


def register_transformers() -> None:
    """Register attn_implementation="fa4" with transformers: `from_pretrained(..., attn_implementation="fa4")`,
    `from_config` and `model.set_attn_implementation("fa4")`.

    Supported are causal and full attention, padding on either side, packed position_ids, cu_seq_lens of data collators,
    sliding windows, softcap, sinks, grouped queries, and the caches of generate(). Padding queries get 0.

    Raises:
        ImportError: transformers is not installed, or older than 5.4, which calls mask functions with other arguments.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    except ImportError as error:
        raise ImportError(f"fa4.register_transformers() needs transformers, from 5.4: {error}") from error
    if "q_length" not in inspect.signature(masking_utils.eager_mask).parameters:
        from transformers import __version__

        raise ImportError(f"fa4.register_transformers() needs transformers, from 5.4, and {__version__} is installed")
    torch.compiler.assume_constant_result(documents.found_to_count_up)
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
    position_ids: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    """Compute attention of one layer; transformers calls this.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim); key and value likewise, with their own heads and lengths.
        attention_mask: the result of `mask`, or a mask of the caller: (batch, seqlen_k), True for keys that are not
            padding, or (batch or 1, heads or 1, seqlen_q, seqlen_k), bool (True: not masked) or added to the scores.
        dropout: config.attention_dropout in training, else 0; seeds come from torch's generator.
        sliding_window: the number of keys per query, including the key at its own position.
        s_aux: (heads_q,) the sinks.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: lengths of sequences packed into one row. Without a
            mask they take precedence over position_ids.
        position_ids: (batch or 1, seqlen_q). Where they restart, a new document begins; documents do not attend to each
            other. Needs equal numbers of keys and queries; padding is allowed.

    Returns:
        (batch, seqlen_q, heads_q, head_dim_v), and None for the attention weights, which are not computed.

    Raises:
        NotImplementedError: a position bias, or a paged cache.
        ValueError: position_ids restart inside a row, on keys of a cache that is filled or longer than the row.
    """
    for name, argument in (("position_bias", position_bias), ("cache (of continuous batching)", cache)):
        if argument is not None:
            raise NotImplementedError(f'{name} is given, and attn_implementation="fa4" has none')
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "learnable_sink": s_aux}
    options["dropout_p"] = dropout
    window: dict[str, Any] = {"causal": causal, "window_size": _window(sliding_window, causal)}
    batch, q_length, kv_length = q.shape[0], q.shape[1], k.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        geometry = q_length, kv_length, kv_length - q_length, 0, _band_function(sliding_window, causal)
        if causal or sliding_window is None:
            attention_mask = _padding_mask(attention_mask, *geometry, causal)
        else:
            attention_mask = documents.blocks(batch, *geometry, attention_mask.bool(), q.device)
    mask_or_lengths: Tensor | BlockMask | PackedLengths | None = attention_mask
    if mask_or_lengths is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        mask_or_lengths = PackedLengths(
            cu_seq_lens_q.int(), cu_seq_lens_k.int(), None, None, max_length_q, max_length_k
        )
    elif position_ids is not None:
        mask_or_lengths = _in_documents(position_ids, attention_mask, batch, q_length, kv_length, causal, q.device)
    if isinstance(mask_or_lengths, Tensor) and mask_or_lengths.dtype == torch.int32:
        mask_or_lengths = documents.unpack(mask_or_lengths, q_length, kv_length)
    if mask_or_lengths is None:
        return flash_attn_func(q, k, v, **options, **window), None
    if isinstance(mask_or_lengths, PackedLengths):
        rows = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        out = flash_attn_varlen_func(*rows, **(mask_or_lengths.named() | options | window))
        return out.unflatten(0, q.shape[:2]), None
    if isinstance(mask_or_lengths, Tensor):
        return flash_attn_func(q, k, v, **_mods(mask_or_lengths, options)), None
    return flash_attn_func(q, k, v, block_mask=mask_or_lengths, **options), None


def _window(sliding_window: int | None, causal: bool) -> tuple[int | None, int | None]:
    if sliding_window is None:
        return None, None
    return sliding_window - 1, None if causal else sliding_window - 1


def _mods(values: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with a mask of the caller, one value per pair."""
    if values.dtype == torch.bool:
        return options | {"mask_mod": documents.mask_mod_of(values)}
    add_bias, cap = bias(values), options["softcap"]
    if not cap:
        return options | {"score_mod": add_bias}

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return add_bias(cap * torch.tanh(score / cap), b, h, q_idx, kv_idx)

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
    **others: Any,
) -> Tensor | BlockMask | None:
    """Return the mask of one kind of layers for `attention`; transformers calls this once per forward pass.

    Args:
        q_offset, kv_offset: the positions of the first query and of the first key.
        mask_function: mask function of positions (True: not masked), without padding.
        attention_mask: (batch, positions) bool, True for positions that are not padding; None is all.
        device: the device of the result.
        others: more information about the mask, for compiled code: see `_parts_when_compiled`.
    """
    compiled_parts: tuple[str, ...] = ()
    if torch.compiler.is_compiling():
        compiled_parts = _parts_when_compiled(
            mask_function, attention_mask is None and q_length == kv_length > 1, others
        )
    parts = set(compiled_parts or _parts(mask_function))
    if not parts <= _SUPPORTED:
        valid_keys = None if attention_mask is None else _keys(attention_mask, kv_length, kv_offset)
        return documents.blocks(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, valid_keys, device)
    if _PACKED in parts:
        if not torch.compiler.is_compiling():
            segments = _segments(mask_function)
            return _table_of(torch.nn.functional.pad(segments.diff() != 0, (1, 0), value=True))
        if not _positions_count_up():
            starts = documents.starts_from_function(mask_function, batch_size, q_length, device)
            lengths = documents.compiled_documents((~starts).int(), None, batch_size, True)
            assert lengths.max_seqlen_q is not None
            return documents.table_of_documents(lengths.cu_seqlens_q, lengths.max_seqlen_q)
    causal = _CAUSAL in parts
    if attention_mask is None:
        if _covers_all_keys(q_length, kv_length, q_offset, kv_offset, causal):
            return None
        attention_mask = torch.ones(batch_size, 1, dtype=torch.bool, device=device).expand(-1, kv_length)
    return _padding_mask(attention_mask, q_length, kv_length, q_offset, kv_offset, mask_function, causal)


def _covers_all_keys(
    q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int | Tensor, causal: bool
) -> bool:
    """Return whether the queries attend to all keys. If not, the keys after the last query are unset cache entries."""
    if isinstance(q_offset, Tensor) or isinstance(kv_offset, Tensor):
        return False
    return not causal or q_offset + q_length == kv_offset + kv_length


def _padding_mask(
    attention_mask: Tensor,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    function: Callable[..., Tensor],
    causal: bool,
) -> Tensor | BlockMask | None:
    """Return the mask of a batch with padding. function: mask function of positions, without padding."""
    valid_keys = _keys(attention_mask, kv_length, kv_offset)
    if _can_read(valid_keys):  # else assume one run of keys per row
        if _covers_all_keys(q_length, kv_length, q_offset, kv_offset, causal) and bool(valid_keys.all()):
            return None
        if bool((valid_keys[:, 0].int() + (valid_keys[:, 1:] & ~valid_keys[:, :-1]).sum(1) > 1).any()):
            return documents.blocks(
                valid_keys.shape[0], q_length, kv_length, q_offset, kv_offset, function, valid_keys, valid_keys.device
            )
    return documents.table_of_runs(valid_keys, q_length, q_offset - kv_offset, causal)


_CAUSAL = "causal_mask_function"
_FULL = "bidirectional_mask_function"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
# Parts of mask functions that the arguments of `attention` also express. Others make a BlockMask: correct, but slower.
_SUPPORTED = {_CAUSAL, "sliding_window_overlay.<locals>.inner_mask", _FULL, _PACKED}
_COMBINED = {
    "and_masks.<locals>.and_mask": "mask_functions",
    "remap_positions_for_packed_sequence.<locals>.inner_mask": "mask_function",
}


def _parts(function: Callable[..., Any]) -> Iterator[str]:
    """Yield the names of the functions that a mask function of transformers combines."""
    name = getattr(function, "__qualname__", repr(function))
    if not getattr(function, "__module__", "").startswith("transformers.") or name not in _COMBINED:
        yield name if getattr(function, "__module__", "").startswith("transformers.") else repr(function)
        return
    closure = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))[_COMBINED[name]].cell_contents
    for part in closure if isinstance(closure, tuple) else (closure,):
        yield from _parts(part)


def _parts_when_compiled(function: Callable[..., Any], may_be_packed: bool, others: dict[str, Any]) -> tuple[str, ...]:
    """Return the result of `_parts` while torch.compile traces, or () if unknown.

    A trace cannot inspect closures, and transformers treats any position_ids as packed (may_be_packed: if it can).
    others: use_vmap is set for the model's own masks, local_size is the size of a window or chunk, allow_is_causal_skip
    is False for packed sequences.
    """
    if not function.__module__.startswith("transformers."):
        return ()
    name = function.__code__.co_name  # (in compiled code a __qualname__ equals no str)
    if name in (_CAUSAL, _FULL):
        return (name,)
    config, window = others.get("config"), others.get("local_size")
    is_window = window is None or (
        window == getattr(config, "sliding_window", None) != getattr(config, "attention_chunk_size", None)
    )
    is_causal = "allow_is_bidirectional_skip" not in others and is_window and not others.get("use_vmap", True)
    if name == "and_mask" and is_causal:
        return (_CAUSAL, _PACKED) if may_be_packed and not others.get("allow_is_causal_skip") else (_CAUSAL,)
    torch._dynamo.graph_break()  # the code after this inspects the function
    return ()


def _can_read(x: Tensor) -> bool:
    """Return whether the host may read values: not while a graph is compiled or captured."""
    return (
        not torch.compiler.is_compiling()
        and has_values(x)
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _keys(valid_keys: Tensor, kv_length: int, kv_offset: int | Tensor) -> Tensor:
    """Return (batch, kv_length), True for keys that are not padding. Positions past the end of the mask are padding."""
    positions = torch.arange(kv_length, device=valid_keys.device) + kv_offset
    return valid_keys.bool()[:, positions.clamp(max=valid_keys.shape[1] - 1)] & (positions < valid_keys.shape[1])


def _table_of(starts: Tensor) -> Tensor:
    """Return the table of documents that fill the rows. starts: (batch, length) bool, their first tokens."""
    if _can_read(starts):
        return documents.table_of_documents(*documents.cu_seqlens_of(starts))
    return documents.table_of_documents(documents.cu_seqlens_on_device(starts), starts.shape[1])


def _in_documents(
    position_ids: Tensor,
    mask: Tensor | BlockMask | None,
    batch: int,
    q_length: int,
    kv_length: int,
    causal: bool,
    device: torch.device,
) -> Tensor | BlockMask | PackedLengths | None:
    """Return the mask restricted to the documents of position_ids.

    Return the mask itself if each row is one document, if it has documents already, or if it is the caller's mask for
    every pair.
    """
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != q_length:
        return mask
    if q_length == 1 or not (causal or q_length == kv_length) or position_ids.is_floating_point():
        return mask
    if isinstance(mask, Tensor) and (mask.dtype != torch.int32 or documents.has_documents(mask)):
        return mask
    table = mask if isinstance(mask, Tensor) else None
    if torch.compiler.is_compiling():
        if (mask is not None and table is None) or _positions_count_up():
            return mask
        if q_length == kv_length:
            return documents.compiled_documents(position_ids, table, batch, causal)
        if table is None:
            valid_keys = torch.ones(batch, kv_length, dtype=torch.bool, device=device)
            table = documents.table_of_runs(valid_keys, q_length, kv_length - q_length, causal)
        return torch.ops.fa4.one_document(position_ids, table, kv_length)
    if not _can_read(position_ids):
        if mask is not None or q_length != kv_length:
            return mask
        kept = torch.ones(batch, q_length, dtype=torch.bool, device=position_ids.device)
        return _table_of(documents.starts_of(position_ids.expand(batch, -1), kept, torch.zeros_like(kept[:, 0])))

    def compute() -> BlockMask | PackedLengths | None:
        if mask is None or isinstance(mask, Tensor):
            return documents.cut(position_ids, table, batch, kv_length, causal, device)
        return documents.blocks_in_documents(mask, position_ids, batch, q_length, kv_length)

    cut = documents.cached_result(compute, position_ids, mask, batch, q_length, kv_length, causal, device)
    return mask if cut is None else cut


def _segments(function: Callable[..., Any]) -> Tensor:
    """Return (batch, length): the sequence index of each position, which transformers derived from position_ids."""
    closure = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    if function.__qualname__ == _PACKED:
        return closure["packed_sequence_mask"].cell_contents
    for part in closure[_COMBINED[function.__qualname__]].cell_contents:
        if _PACKED in _parts(part):
            return _segments(part)
    raise AssertionError("mask functions of packed sequences hold what the sequences are")


def _band_function(sliding_window: int | None, causal: bool) -> Callable[..., Tensor]:
    """Return the mask function of positions that `attention` applies without a mask."""
    left, right = _window(sliding_window, causal)
    right = 0 if causal else right

    def function(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        unmasked = kv_idx >= 0
        unmasked = unmasked if left is None else unmasked & (kv_idx >= q_idx - left)
        return unmasked if right is None else unmasked & (kv_idx <= q_idx + right)

    return function


def _positions_count_up() -> bool:
    """Return whether compiled code makes position_ids by torch.arange, in the calling function or in its caller.

    Models without given position_ids do so: each row is one document. False if unknown.
    """
    if not torch.compiler.is_dynamo_compiling():
        return False
    torch._dynamo.comptime.comptime(documents.look_for_arange)
    return documents.found_to_count_up()
