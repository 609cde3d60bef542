"""Documents and padding in the rows of a batch: cu_seqlens and block masks from position_ids and attention masks.

A document begins where the position is lower than the previous one, or equal to the lowest position of the row.
Padding is skipped: a token is compared with the previous token that is not padding.

A table is an int32 tensor with four axes, which transformers passes from its mask functions to the layers unchanged:

* (1, 1, 4, 2 * batch + 1), a table of runs: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k. Each row of the batch is
  two sequences: the unused leading padding, then the run of tokens with the unused padding after it. The last column of
  seqused is filler.
* (longest, 1, 2, documents + 1), a table of documents without padding: cu_seqlens_q, cu_seqlens_k. The first axis is
  expanded: its size is the length of the longest document.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..mods.frontend.blocks import create_block_mask
from ..runtime.torch_internals import entry
from ..torch_ops import ops

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class PackedLengths(NamedTuple):
    """Lengths for `flash_attn_varlen_func`, with its argument names."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    def named(self) -> dict[str, Any]:
        """Return the keyword arguments. (torch.compile of torch 2.8 does not support _asdict.)"""
        return dict(zip(_LENGTHS, self))


_LENGTHS = PackedLengths._fields


def table_of_runs(valid_keys: Tensor, q_length: int, shift: int | Tensor, causal: bool) -> Tensor:
    """Return the table of a batch with one run of keys per row.

    Args:
        valid_keys: (batch, kv_length) bool, True for keys that are not padding.
        shift: the index of the key at the position of query 0.
    """
    batch, kv_length = valid_keys.shape
    start, stop = valid_keys.int().argmax(1), valid_keys.sum(1)
    stop = start + stop
    first, end = torch.zeros_like(start), torch.full_like(start, q_length)
    if causal:  # drop padding queries, so that the last query aligns with the last key
        stop = torch.clamp(stop, max=shift + q_length)
        start = torch.minimum(start, stop)
        first, end = (start - shift).clamp(0, q_length), (stop - shift).clamp(0, q_length)
    rows = torch.arange(batch, device=valid_keys.device)
    sides = ((q_length, first, end), (kv_length, start, stop))
    bounds = [torch.stack((rows * n, rows * n + a), 1).flatten() for n, a, _ in sides]
    bounds = [pad(x, (0, 1), value=batch * n) for x, (n, _, _) in zip(bounds, sides)]
    used = [pad(torch.stack((torch.zeros_like(a), b - a), 1).flatten(), (0, 1)) for _, a, b in sides]
    return torch.stack((*bounds, *used)).to(torch.int32)[None, None]


def has_documents(table: Tensor) -> bool:
    """Return whether a table is a table of documents."""
    return table.shape[2] == 2


def table_of_documents(cu_seqlens: Tensor, longest: int) -> Tensor:
    """Return the table of documents that fill the rows. cu_seqlens: (documents + 1,)."""
    return torch.stack((cu_seqlens, cu_seqlens)).to(torch.int32)[None, None].expand(longest, -1, -1, -1)


def unpack(table: Tensor, q_length: int, kv_length: int) -> PackedLengths:
    """Return the lengths in a table. q_length, kv_length: rows' lengths, the bounds for a table of runs."""
    if has_documents(table):
        cu_seqlens_q, cu_seqlens_k = table[0, 0]
        return PackedLengths(cu_seqlens_q, cu_seqlens_k, None, None, table.shape[0], table.shape[0])
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = table[0, 0]
    return PackedLengths(cu_seqlens_q, cu_seqlens_k, seqused_q[:-1], seqused_k[:-1], q_length, kv_length)


def cu_seqlens_of(starts: Tensor) -> tuple[Tensor, int]:
    """Return cu_seqlens on the device of `starts`, and the longest length. Synchronizes with the device.

    Args:
        starts: (batch, length) bool, True for the first token of each document and of each row.
    """
    bounds = pad(starts.cpu().flatten().nonzero().flatten(), (0, 1), value=starts.numel())
    return bounds.to(starts.device, torch.int32), int(bounds.diff().max())


def cu_seqlens_on_device(starts: Tensor) -> Tensor:
    """Return cu_seqlens without synchronization, for CUDA graph capture: one sequence per token, those after the last
    document empty."""
    starts = starts.flatten()
    positions = torch.arange(starts.numel(), device=starts.device)
    return pad(torch.where(starts, positions, starts.numel()).sort().values, (0, 1), value=starts.numel()).int()


def starts_of(position_ids: Tensor, kept: Tensor, follows_cache: Tensor) -> Tensor:
    """Return (batch, length) bool, True for the first token of each document and the first kept token of each row.

    Args:
        position_ids: (batch, length).
        kept: (batch, length) bool, True for tokens that are not padding.
        follows_cache: (batch,) bool, whether keys of a cache precede the row. The lowest position of such a row counts
            as 0, because its tokens may continue a document.
    """
    positions = torch.arange(kept.shape[1], device=kept.device)
    before = pad(torch.where(kept, positions, -1).cummax(1).values[:, :-1], (1, 0), value=-1)
    previous = position_ids.gather(1, before.clamp(min=0))
    lowest = position_ids.masked_fill(~kept, torch.iinfo(position_ids.dtype).max).amin(1)
    lowest = lowest.masked_fill(follows_cache, 0)[:, None]
    return kept & ((before < 0) | (position_ids < previous) | (position_ids == lowest))


def starts_from_function(
    function: Callable[..., Tensor], batch: int, length: int, device: torch.device | str
) -> Tensor:
    """Return (batch, length) bool, True for positions whose pair with the previous position is masked.

    Args:
        function: a mask function of causal windows within packed sequences.
    """
    b, i = torch.arange(batch, device=device)[:, None], torch.arange(length, device=device)
    unmasked = function(b, torch.zeros_like(b), i, (i - 1).clamp(min=0))
    return ~unmasked.expand(batch, length) | (i == 0)


def check_restarts(starts: Tensor, may_restart: Tensor) -> None:
    """Raise if a document begins inside a row that must have only one.

    Args:
        starts: (batch, length) bool on the host, from `starts_of`.
        may_restart: (batch,) bool on the host.

    Raises:
        ValueError: a row without `may_restart` has more than one document.
    """
    refused = ((starts.sum(1) > 1) & ~may_restart).nonzero().flatten().tolist()
    if refused:
        column = int(starts[refused[0]].nonzero()[1])
        raise ValueError(
            f"position_ids restart in row {refused[0]} at token {column}, on the keys of a cache that is filled or "
            "longer than the row, expected rising positions: documents in one row need as many keys as queries. Pass "
            "packed documents without past_key_values, or each in a row of its own"
        )


@entry("_disable_dynamo", lambda function: function)  # compiling host-side sizes gains nothing
def cut(
    position_ids: Tensor,
    table: Tensor | None,
    batch: int,
    kv_length: int,
    causal: bool,
    device: torch.device,
    always_return: bool = False,
) -> PackedLengths | None:
    """Return documents and padding as one batch of packed sequences on `device`. Synchronizes with the device.

    A row of the batch becomes one sequence of its leading padding (if there is a table), then one per document.

    Args:
        position_ids: (batch or 1, length).
        table: a table of runs; None for rows without padding.
        kv_length: keys per row.
        always_return: return sequences even if no document begins inside a row; otherwise None is returned then.

    Raises:
        ValueError: documents begin inside rows with different numbers of queries and keys.
    """
    length, ids_device = position_ids.shape[1], position_ids.device
    rows = torch.arange(batch, device=ids_device)
    if table is None:
        first = start = torch.zeros_like(rows)
        of_q, of_k = torch.full_like(rows, length), torch.full_like(rows, kv_length)
    else:
        cu_seqlens_q, cu_seqlens_k, of_q, of_k = (x[1::2] for x in table[0, 0].to(ids_device).long())
        first, start = cu_seqlens_q - rows * length, cu_seqlens_k - rows * kv_length
        if not causal:  # padding is the same for queries and keys
            first, of_q = start, of_k
        position_ids = position_ids.expand(batch, -1)
    distinct = slice(position_ids.shape[0])  # one row if all have the same position_ids
    positions = torch.arange(length, device=ids_device)
    kept = (positions >= first[distinct, None]) & (positions < (first + of_q)[distinct, None])
    starts = starts_of(position_ids, kept, (of_k > of_q)[distinct])
    if not always_return and not bool((starts.sum(1) > 1).any()):
        return None
    starts, rows, first, start, of_q, of_k = (
        x.cpu() for x in (starts.expand(batch, -1), rows, first, start, of_q, of_k)
    )
    check_restarts(starts, (of_q == of_k) & (length == kv_length))
    row, column = starts.nonzero(as_tuple=True)
    begin_q = row * length + column
    begin_k = row * kv_length + column + (start - first)[row]
    end = row * length + (first + of_q)[row]
    used_q = torch.minimum(pad(begin_q[1:], (0, 1), value=batch * length), end) - begin_q
    used_k = used_q + (of_k - of_q)[row]
    if table is not None:
        begin_q, order = torch.cat((rows * length, begin_q)).sort(stable=True)
        begin_k = torch.cat((rows * kv_length, begin_k))[order]
        used_q, used_k = (torch.cat((torch.zeros_like(rows), x))[order] for x in (used_q, used_k))
    bounds_q, bounds_k = pad(begin_q, (0, 1), value=batch * length), pad(begin_k, (0, 1), value=batch * kv_length)
    has_padding = always_return or table is not None
    sizes = (x.to(device, torch.int32) for x in (bounds_q, bounds_k, *((used_q, used_k) if has_padding else ())))
    cu_seqlens_q, cu_seqlens_k, *used = sizes
    longest = (int(x.diff().max()) for x in (bounds_q, bounds_k))
    return PackedLengths(cu_seqlens_q, cu_seqlens_k, *(used or (None, None)), *longest)


def mask_mod_of(values: Tensor, marks_masked: bool = False) -> Callable[..., Tensor]:
    """Return the mask_mod of a bool tensor of pairs, (batch, heads, seqlen_q, seqlen_k), where an axis of size 1 is
    broadcast. marks_masked: True in it means masked, instead of not masked."""
    shared_axes = [size == 1 for size in values.shape]

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        indices = (0 if is_shared else i for is_shared, i in zip(shared_axes, (b, h, q_idx, kv_idx)))
        pair = values[tuple(indices)]
        return ~pair if marks_masked else pair

    return mask_mod


def blocks(
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    function: Callable[..., Tensor],
    valid_keys: Tensor | None,
    device: torch.device | str,
) -> BlockMask:
    """Return any mask as a `BlockMask`.

    Args:
        q_offset, kv_offset: the positions of the first query and of the first key.
        function: mask function of positions (True: not masked), without padding.
        valid_keys: (batch, kv_length) bool, True for keys that are not padding; None is all.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        unmasked = function(b, h, q_idx + q_offset, kv_idx + kv_offset)
        return unmasked if valid_keys is None else unmasked & valid_keys[b, kv_idx]

    block_mask = create_block_mask(mask_mod, batch, None, q_length, kv_length, device=device)
    if not torch.compiler.is_compiling():
        block_mask.padding = valid_keys, q_offset - kv_offset  # for blocks_in_documents
    return block_mask


def blocks_in_documents(
    mask: BlockMask, position_ids: Tensor, batch: int, q_length: int, kv_length: int
) -> BlockMask | None:
    """Return a mask of `blocks` restricted to documents; None for other masks, and if each row is one document.

    Raises:
        ValueError: documents begin inside rows with different numbers of queries and keys.
    """
    if not hasattr(mask, "padding"):
        return None
    valid_keys, shift = mask.padding[0], int(mask.padding[1])
    keys = torch.arange(q_length) + shift
    kept = torch.ones(batch, q_length, dtype=torch.bool)
    if valid_keys is not None:
        kept = valid_keys.cpu()[:, keys.clamp(0, kv_length - 1)] & (keys >= 0) & (keys < kv_length)
    starts = starts_of(position_ids.cpu().expand(batch, -1), kept, torch.full((batch,), shift > 0))
    check_restarts(starts, torch.full((batch,), q_length == kv_length))
    if not bool((starts.sum(1) > 1).any()):
        return None
    document, inner = starts.cumsum(1).to(position_ids.device), mask.mask_mod

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return inner(b, h, q_idx, kv_idx) & (document[b, q_idx] == document[b, kv_idx])

    return create_block_mask(mask_mod, batch, None, q_length, kv_length, device=position_ids.device)


# Cache of the last forward passes: reading values synchronizes, and the layers of a model share the result.
_MAX_ENTRIES = 4  # kinds of masks in one model
_cache: tuple[tuple[tuple, tuple, Any], ...] = ()


def cached_result(make: Callable[[], Any], position_ids: Tensor, mask: Any, *key: Any) -> Any:
    """Return make(), or its cached result for the same objects with the same versions."""
    global _cache
    objects = (position_ids, mask)
    if any(isinstance(x, Tensor) and x.is_inference() for x in objects):  # inference tensors have no versions
        return make()
    state = tuple(x._version if isinstance(x, Tensor) else None for x in objects), key
    for found, entry_state, result in _cache:
        if entry_state == state and all(ref() is x for ref, x in zip(found, objects)):
            return result
    result = make()
    refs = tuple((lambda: None) if x is None else weakref.ref(x) for x in objects)
    live_entries = tuple(x for x in _cache if x[0][0]() is not None)
    _cache = ((refs, state, result), *live_entries)[:_MAX_ENTRIES]  # (threads may overwrite each other's entries)
    return result


# Operators of compiled code -------------------------------------------------------------------------------------------


def compiled_documents(position_ids: Tensor, table: Tensor | None, batch: int, causal: bool) -> PackedLengths:
    """Return the documents of a batch in compiled code, for equal numbers of keys and queries. Sizes are unbacked."""
    cu_q, cu_k, *used, longest = torch.ops.fa4.documents(position_ids, table, batch, causal)
    seqused_q, seqused_k = (None, None) if table is None else used
    return PackedLengths(cu_q, cu_k, seqused_q, seqused_k, longest.shape[0], longest.shape[1])


def _documents(position_ids: Tensor, table: Tensor | None, batch: int, causal: bool) -> tuple[Tensor, ...]:
    found = cut(position_ids, table, batch, position_ids.shape[1], causal, position_ids.device, always_return=True)
    assert found is not None
    *lengths, longest_q, longest_k = found
    return *lengths, position_ids.new_empty((longest_q, longest_k, 0), dtype=torch.int32)


def _documents_fake(position_ids: Tensor, table: Tensor | None, batch: int, causal: bool) -> tuple[Tensor, ...]:
    context = torch.library.get_ctx()
    bounds = context.new_dynamic_size(min=2)
    longest = context.new_dynamic_size(min=1), context.new_dynamic_size(min=1)
    shapes = ((bounds,), (bounds,), (bounds - 1,), (bounds - 1,), (*longest, 0))
    return tuple(position_ids.new_empty(shape, dtype=torch.int32) for shape in shapes)


def _one_document(position_ids: Tensor, table: Tensor, kv_length: int) -> Tensor:
    """Return the table of rows with keys of a cache; raise ValueError if positions restart."""
    if not (table.is_cuda and torch.cuda.is_current_stream_capturing()):
        cut(position_ids, table, table.shape[3] // 2, kv_length, True, table.device)
    return table.clone()


_tags = [torch.Tag.pt2_compliant_tag, torch.Tag.dynamic_output_shape]
if hasattr(torch.Tag, "cudagraph_unsafe"):
    _tags.append(torch.Tag.cudagraph_unsafe)
ops.library.define(
    "documents(Tensor position_ids, Tensor? table, SymInt batch, bool causal) -> "
    "(Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor seqused_q, Tensor seqused_k, Tensor longest)",
    tags=tuple(_tags),
)
ops.library.define("one_document(Tensor position_ids, Tensor table, SymInt kv_length) -> Tensor")
for _name, _kernel, _fake in (
    ("documents", _documents, _documents_fake),
    ("one_document", _one_document, lambda position_ids, table, kv_length: table.new_empty(table.shape)),
):
    ops.library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fa4::{_name}", _fake, lib=ops.library)


# Positions in the graphs of torch.compile -----------------------------------------------------------------------------

_counts_up = False


def look_for_arange(context: Any) -> None:
    """Record whether torch.arange makes position_ids; runs while torch.compile traces _positions_count_up."""
    global _counts_up
    _counts_up = False
    for level in (1, 2):  # the calling function, and its caller
        try:
            _counts_up = _is_arange(context.get_local("position_ids", stacklevel=level).as_proxy().node)
            return
        except Exception:  # the function has no position_ids, or torch has no such entry point
            continue


def found_to_count_up() -> bool:
    """Return the result of `look_for_arange`: constant in a trace, because torch guards on position_ids being given."""
    return _counts_up


def _is_arange(node: Any) -> bool:
    """Return whether a graph node is torch.arange, possibly with a number added and leading axes."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, Tensor) or value._version:  # modified in place
        return False
    if node.target is torch.arange:
        return len(node.args) < 3 and "step" not in node.kwargs
    if node.target in (operator.add, operator.sub, torch.add, torch.sub, "add", "sub"):
        other = node.args[1]
        other = other.meta.get("example_value") if isinstance(other, torch.fx.Node) else other
        keeps = not isinstance(other, Tensor) or other.ndim == 0
    elif node.target == "unsqueeze":
        keeps = node.args[1:] == (0,)
    else:
        keeps = node.target in ("expand", "to", "long", "int", "clone", "contiguous")
    return keeps and _is_arange(node.args[0])
