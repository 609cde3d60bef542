"""fa4 in transformers: the attention function and the mask function behind attn_implementation="fa4".

A mask never becomes N x N. The mask function runs once a forward pass and returns one of these, which every layer gets:

* None: causal or full attention of whole sequences, with the layer's own sliding window.
* A table of lengths, int32 of four axes (see `documents`): padded batches and packed position_ids, as packed sequences
  of the rows as they lie.
* A `BlockMask` that says all: other kinds of masks, as chunks, images that see themselves whole, or padding amidst.

transformers looks for packed position_ids only without a cache and without a mask, and some models never show it their
position_ids. So the layers look at them too, once for all layers, as transformers' flash_attention_2 does.

Compiled code cannot read values. There `torch.ops.fa4.documents` finds documents at run time, unless the model counts
the positions itself by torch.arange: then no row is packed, and the call is the one without position_ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..api import flash_attn_func, flash_attn_varlen_func
from ..scores import bias
from ..torch_internals import has_values
from . import documents
from .documents import Packed

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

NAME = "fa4"  # without "flash", which transformers takes for a package to look for


def register_transformers() -> None:
    """Make attn_implementation="fa4" known to transformers: `from_pretrained(..., attn_implementation="fa4")`,
    `from_config` and `model.set_attn_implementation("fa4")`.

    Causal and full attention, padding on either side, packed position_ids, cu_seq_lens of data collators, sliding
    windows, softcap, sinks, grouped queries, and the caches of generate(). Queries that are padding get 0.

    Raises:
        ImportError: transformers is not installed, or older than 5.4, where mask functions get other arguments.
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
    """Attention of one layer, as transformers calls it.

    Args:
        query: (batch, heads_q, seqlen_q, head_dim); key and value likewise, with their own heads and lengths.
        attention_mask: what `mask` returned, or a mask of the caller: (batch, seqlen_k) of keys that are no padding, or
            one for (batch or 1, heads or 1, seqlen_q, seqlen_k), bool (True is seen) or added to the scores.
        dropout: config.attention_dropout in training, else 0; seeds come from torch's generator.
        sliding_window: keys that a query sees, its own among them.
        s_aux: (heads_q,) the sinks.
        cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: of sequences packed into one row.
        position_ids: (batch or 1, seqlen_q). Where they restart, another document begins, which sees no other: with or
            without padding, for as many keys as queries. Where there is no mask, cu_seq_lens come first.

    Returns:
        (batch, seqlen_q, heads_q, head_dim_v), and None for the weights, which are never there.

    Raises:
        NotImplementedError: a position bias, or a paged cache.
        ValueError: position_ids restart inside a row, on keys of a cache that is filled or longer than the row.
    """
    for name, given in (("position_bias", position_bias), ("cache (of continuous batching)", cache)):
        if given is not None:
            raise NotImplementedError(f'{name} is given, and attn_implementation="fa4" has none')
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "learnable_sink": s_aux}
    options["dropout_p"] = dropout
    window: dict[str, Any] = {"causal": causal, "window_size": _window(sliding_window, causal)}
    batch, q_length, kv_length = q.shape[0], q.shape[1], k.shape[1]
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        place = q_length, kv_length, kv_length - q_length, 0, _band(sliding_window, causal)
        if causal or sliding_window is None:
            attention_mask = _of_padding(attention_mask, *place, causal)
        else:
            attention_mask = documents.blocks(batch, *place, attention_mask.bool(), q.device)
    found: Tensor | BlockMask | Packed | None = attention_mask
    if found is None and cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        found = Packed(cu_seq_lens_q.int(), cu_seq_lens_k.int(), None, None, max_length_q, max_length_k)
    elif position_ids is not None:
        found = _in_documents(position_ids, attention_mask, batch, q_length, kv_length, causal, q.device)
    if isinstance(found, Tensor) and found.dtype == torch.int32:
        found = documents.unpack(found, q_length, kv_length)
    if found is None:
        return flash_attn_func(q, k, v, **options, **window), None
    if isinstance(found, Packed):
        rows = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        out = flash_attn_varlen_func(*rows, **(found.named() | options | window))
        return out.unflatten(0, q.shape[:2]), None
    if isinstance(found, Tensor):
        return flash_attn_func(q, k, v, **_mods(found, options)), None
    return flash_attn_func(q, k, v, block_mask=found, **options), None


def _window(sliding_window: int | None, causal: bool) -> tuple[int | None, int | None]:
    if sliding_window is None:
        return None, None
    return sliding_window - 1, None if causal else sliding_window - 1


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
    **others: Any,
) -> Tensor | BlockMask | None:
    """Mask of one kind of layers, as transformers calls it once a forward pass; `attention` gets the result.

    Args:
        q_offset, kv_offset: the positions of the first query and of the first key.
        mask_function: the pairs of positions that are seen, padding aside.
        attention_mask: (batch, positions) bool, the positions that are no padding; None is all.
        device: the device of the result.
        others: further facts about the mask, for compiled code: see `_parts_when_compiled`.
    """
    told: tuple[str, ...] = ()
    if torch.compiler.is_compiling():
        told = _parts_when_compiled(mask_function, attention_mask is None and q_length == kv_length > 1, others)
    parts = set(told or _parts(mask_function))
    if not parts <= _KNOWN:
        there = None if attention_mask is None else _keys(attention_mask, kv_length, kv_offset)
        return documents.blocks(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, there, device)
    if _PACKED in parts:
        if not torch.compiler.is_compiling():
            segments = _segments(mask_function)
            return _table_of(torch.nn.functional.pad(segments.diff() != 0, (1, 0), value=True))
        if not _positions_count_up():
            starts = documents.starts_by_asking(mask_function, batch_size, q_length, device)
            found = documents.compiled_documents((~starts).int(), None, batch_size, True)
            assert found.max_seqlen_q is not None
            return documents.table_of_documents(found.cu_seqlens_q, found.max_seqlen_q)
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
    if _can_look(there):  # else each row is taken for one run of keys
        if _reaches_all(q_length, kv_length, q_offset, kv_offset, causal) and bool(there.all()):
            return None
        if bool((there[:, 0].int() + (there[:, 1:] & ~there[:, :-1]).sum(1) > 1).any()):
            return documents.blocks(
                there.shape[0], q_length, kv_length, q_offset, kv_offset, function, there, there.device
            )
    return documents.table_of_runs(there, q_length, q_offset - kv_offset, causal)


_CAUSAL = "causal_mask_function"
_FULL = "bidirectional_mask_function"
_PACKED = "packed_sequence_mask_function.<locals>.inner_mask"
# Parts of mask functions that the arguments of `attention` say too. Any other makes a BlockMask, as right and slower.
_KNOWN = {
    _CAUSAL,
    "sliding_window_overlay.<locals>.inner_mask",
    _FULL,
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


def _parts_when_compiled(function: Callable[..., Any], may_be_packed: bool, others: dict[str, Any]) -> tuple[str, ...]:
    """What `_parts` tells, where torch.compile traces: there nobody can look into functions that others join, and
    transformers takes any position_ids for packed ones (`may_be_packed`: if it can). Empty for what it cannot tell.

    others: use_vmap is set for masks of the model's own, local_size is a window's or a chunk's, allow_is_causal_skip is
    False for packed sequences.
    """
    if not function.__module__.startswith("transformers."):
        return ()
    name = function.__code__.co_name  # (a __qualname__ equals no text in compiled code)
    if name in (_CAUSAL, _FULL):
        return (name,)
    config, window = others.get("config"), others.get("local_size")
    is_window = window is None or (
        window == getattr(config, "sliding_window", None) != getattr(config, "attention_chunk_size", None)
    )
    is_causal = "allow_is_bidirectional_skip" not in others and is_window and not others.get("use_vmap", True)
    if name == "and_mask" and is_causal:
        return (_CAUSAL, _PACKED) if may_be_packed and not others.get("allow_is_causal_skip") else (_CAUSAL,)
    torch._dynamo.graph_break()  # what follows looks into the function
    return ()


def _can_look(x: Tensor) -> bool:
    """Whether the host may read values: not where a graph is compiled or captured."""
    return (
        not torch.compiler.is_compiling()
        and has_values(x)
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _keys(there: Tensor, kv_length: int, kv_offset: int | Tensor) -> Tensor:
    """(batch, kv_length): which keys are no padding. Positions that the mask does not reach are not there."""
    positions = torch.arange(kv_length, device=there.device) + kv_offset
    return there.bool()[:, positions.clamp(max=there.shape[1] - 1)] & (positions < there.shape[1])


def _table_of(starts: Tensor) -> Tensor:
    """Return the table of documents that fill the rows. starts: (batch, length) bool, the tokens that begin one."""
    if _can_look(starts):
        return documents.table_of_documents(*documents.cu_seqlens_of(starts))
    return documents.table_of_documents(documents.cu_seqlens_without_reading(starts), starts.shape[1])


def _in_documents(
    position_ids: Tensor,
    mask: Tensor | BlockMask | None,
    batch: int,
    q_length: int,
    kv_length: int,
    causal: bool,
    device: torch.device,
) -> Tensor | BlockMask | Packed | None:
    """Return the mask within the documents of position_ids.

    It is the mask itself where each row is one document, where it has documents already, and where it is a mask of the
    caller for every pair.
    """
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != q_length:
        return mask
    if q_length == 1 or not (causal or q_length == kv_length) or position_ids.is_floating_point():
        return mask
    if isinstance(mask, Tensor) and (mask.dtype != torch.int32 or documents.is_of_documents(mask)):
        return mask
    table = mask if isinstance(mask, Tensor) else None
    if torch.compiler.is_compiling():
        if (mask is not None and table is None) or _positions_count_up():
            return mask
        if q_length == kv_length:
            return documents.compiled_documents(position_ids, table, batch, causal)
        if table is None:
            there = torch.ones(batch, kv_length, dtype=torch.bool, device=device)
            table = documents.table_of_runs(there, q_length, kv_length - q_length, causal)
        return documents.compiled_check(position_ids, table, kv_length)
    if not _can_look(position_ids):
        if mask is not None or q_length != kv_length:
            return mask
        kept = torch.ones(batch, q_length, dtype=torch.bool, device=position_ids.device)
        return _table_of(documents.starts_of(position_ids.expand(batch, -1), kept, torch.zeros_like(kept[:, 0])))

    def found() -> BlockMask | Packed | None:
        if mask is None or isinstance(mask, Tensor):
            return documents.cut(position_ids, table, batch, kv_length, causal, device)
        return documents.blocks_in_documents(mask, position_ids, batch, q_length, kv_length)

    cut = documents.remembered(found, position_ids, mask, batch, q_length, kv_length, causal, device)
    return mask if cut is None else cut


def _segments(function: Callable[..., Any]) -> Tensor:
    """(batch, length): which sequence each position belongs to, as transformers found it in position_ids."""
    inside = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    if function.__qualname__ == _PACKED:
        return inside["packed_sequence_mask"].cell_contents
    for part in inside[_JOINED[function.__qualname__]].cell_contents:
        if _PACKED in _parts(part):
            return _segments(part)
    raise AssertionError("mask functions of packed sequences hold what the sequences are")


def _band(sliding_window: int | None, causal: bool) -> Callable[..., Tensor]:
    """What `attention` sees of positions without a mask."""
    left, right = _window(sliding_window, causal)
    right = 0 if causal else right

    def function(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = kv_idx >= 0
        seen = seen if left is None else seen & (kv_idx >= q_idx - left)
        return seen if right is None else seen & (kv_idx <= q_idx + right)

    return function


def _positions_count_up() -> bool:
    """Whether compiled code makes position_ids by torch.arange, in the function that asks or in its caller.

    Models that are given no position_ids do so: each row is one document. False where that cannot be told.
    """
    if not torch.compiler.is_dynamo_compiling():
        return False
    torch._dynamo.comptime.comptime(documents.look_for_arange)
    return documents.found_to_count_up()
