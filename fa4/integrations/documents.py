"""Documents and padding in the rows of a batch: cu_seqlens and block masks from position_ids and attention masks.

A document begins where positions fall, and where they stand at the lowest position of the row. Padding is skipped:
the position of a token is compared with that of the token before it that is no padding.

A table is an int32 tensor of four axes, which transformers hands from its mask functions to the layers unchanged:

* (1, 1, 4, 2 * batch + 1), a table of runs: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k. Each row of the batch is
  two sequences: unused padding, then the run of tokens with the unused padding behind it. The last column of seqused
  is filler.
* (longest, 1, 2, documents + 1), a table of documents without padding: cu_seqlens_q, cu_seqlens_k. The first axis is
  expanded: its extent is the length of the longest document.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import ops
from ..mods.blocks import create_block_mask
from ..torch_internals import entry

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Packed(NamedTuple):
    """The lengths that `flash_attn_varlen_func` takes, under its names."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    def named(self) -> dict[str, Any]:
        """Return the keyword arguments. (No _asdict: the compiler of torch 2.8 does not know it.)"""
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            "seqused_q": self.seqused_q,
            "seqused_k": self.seqused_k,
            "max_seqlen_q": self.max_seqlen_q,
            "max_seqlen_k": self.max_seqlen_k,
        }


def table_of_runs(there: Tensor, q_length: int, shift: int | Tensor, causal: bool) -> Tensor:
    """Return the table of a batch with one run of keys a row.

    Args:
        there: (batch, kv_length) bool, the keys that are no padding.
        shift: the key at which query 0 stands.
    """
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
    bounds = [torch.stack((rows * n, rows * n + a), 1).flatten() for n, a, _ in sides]
    bounds = [pad(x, (0, 1), value=batch * n) for x, (n, _, _) in zip(bounds, sides)]
    used = [torch.stack((torch.zeros_like(a), b - a), 1).flatten() for _, a, b in sides]
    used = [pad(x, (0, 1)) for x in used]
    return torch.stack((*bounds, *used)).to(torch.int32)[None, None]


def is_of_documents(table: Tensor) -> bool:
    """Whether a table is one of documents without padding."""
    return table.shape[2] == 2


def table_of_documents(cu_seqlens: Tensor, longest: int) -> Tensor:
    """Return the table of documents that fill the rows. cu_seqlens: (documents + 1,)."""
    return torch.stack((cu_seqlens, cu_seqlens)).to(torch.int32)[None, None].expand(longest, -1, -1, -1)


def unpack(table: Tensor, q_length: int, kv_length: int) -> Packed:
    """Return the lengths in a table. q_length, kv_length: of a row, the bounds of what the table does not bound."""
    if is_of_documents(table):
        cu_seqlens_q, cu_seqlens_k = table[0, 0]
        return Packed(cu_seqlens_q, cu_seqlens_k, None, None, table.shape[0], table.shape[0])
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = table[0, 0]
    return Packed(cu_seqlens_q, cu_seqlens_k, seqused_q[:-1], seqused_k[:-1], q_length, kv_length)


def cu_seqlens_of(starts: Tensor) -> tuple[Tensor, int]:
    """Return cu_seqlens on the device of `starts`, and the longest length; the host waits for the device.

    Args:
        starts: (batch, length) bool, the tokens that begin a document; the first token of each row is one.
    """
    bounds = pad(starts.cpu().flatten().nonzero().flatten(), (0, 1), value=starts.numel())
    return bounds.to(starts.device, torch.int32), int(bounds.diff().max())


def cu_seqlens_without_reading(starts: Tensor) -> Tensor:
    """Return cu_seqlens where the host cannot wait, as in the capture of a CUDA graph: a sequence for each token, of
    which those past the last document are empty."""
    starts = starts.flatten()
    places = torch.arange(starts.numel(), device=starts.device)
    return pad(torch.where(starts, places, starts.numel()).sort().values, (0, 1), value=starts.numel()).int()


def starts_of(position_ids: Tensor, kept: Tensor, is_behind: Tensor) -> Tensor:
    """Return (batch, length) bool, the tokens that begin a document; the first kept token of each row is one.

    Args:
        position_ids: (batch, length).
        kept: (batch, length) bool, the tokens that are no padding.
        is_behind: (batch,) bool, whether earlier keys of a cache lie before the row. Of such a row the lowest position
            is 0: its tokens may continue a document.
    """
    places = torch.arange(kept.shape[1], device=kept.device)
    before = pad(torch.where(kept, places, -1).cummax(1).values[:, :-1], (1, 0), value=-1)
    previous = position_ids.gather(1, before.clamp(min=0))
    lowest = position_ids.masked_fill(~kept, torch.iinfo(position_ids.dtype).max).amin(1)
    lowest = lowest.masked_fill(is_behind, 0)[:, None]
    return kept & ((before < 0) | (position_ids < previous) | (position_ids == lowest))


def starts_by_asking(function: Callable[..., Tensor], batch: int, length: int, device: torch.device | str) -> Tensor:
    """Return (batch, length) bool, the positions that do not see the one before them.

    Args:
        function: a mask function of causal windows within packed sequences.
    """
    b, i = torch.arange(batch, device=device)[:, None], torch.arange(length, device=device)
    sees = function(b, torch.zeros_like(b), i, (i - 1).clamp(min=0))
    return ~sees.expand(batch, length) | (i == 0)


def refuse_restarts(starts: Tensor, may_restart: Tensor) -> None:
    """Refuse documents that begin inside rows where they may not.

    Args:
        starts: (batch, length) bool on the host, from `starts_of`.
        may_restart: (batch,) bool on the host.

    Raises:
        ValueError: a row has more than one document and may not.
    """
    refused = ((starts.sum(1) > 1) & ~may_restart).nonzero().flatten().tolist()
    if refused:
        column = int(starts[refused[0]].nonzero()[1])
        raise ValueError(
            f"position_ids restart in row {refused[0]} at token {column}, on the keys of a cache that is filled or "
            "longer than the row, expected rising positions: documents in one row need as many keys as queries. Pass "
            "packed documents without past_key_values, or each in a row of its own"
        )


@entry("_disable_dynamo", lambda function: function)  # torch.compile gains nothing from sizes on the host
def cut(
    position_ids: Tensor,
    table: Tensor | None,
    batch: int,
    kv_length: int,
    causal: bool,
    device: torch.device,
    always: bool = False,
) -> Packed | None:
    """Return documents and padding as one batch of packed sequences on `device`; the host waits for the device.

    A row of the batch becomes one sequence of its leading padding (if there is a table), then a sequence a document.

    Args:
        position_ids: (batch or 1, length).
        table: a table of runs, None for rows without padding.
        kv_length: keys of a row.
        always: also return sequences where no document begins inside a row. Else None is returned.

    Raises:
        ValueError: documents begin inside rows whose queries are not their keys.
    """
    length, on = position_ids.shape[1], position_ids.device
    rows = torch.arange(batch, device=on)
    if table is None:
        first = start = torch.zeros_like(rows)
        of_q, of_k = torch.full_like(rows, length), torch.full_like(rows, kv_length)
    else:
        cu_seqlens_q, cu_seqlens_k, of_q, of_k = (x[1::2] for x in table[0, 0].to(on).long())
        first, start = cu_seqlens_q - rows * length, cu_seqlens_k - rows * kv_length
        if not causal:  # queries that are padding count as the keys do
            first, of_q = start, of_k
        position_ids = position_ids.expand(batch, -1)
    known = slice(position_ids.shape[0])  # rows that differ
    places = torch.arange(length, device=on)
    kept = (places >= first[known, None]) & (places < (first + of_q)[known, None])
    starts = starts_of(position_ids, kept, (of_k > of_q)[known])
    if not always and not bool((starts.sum(1) > 1).any()):
        return None
    starts, rows, first, start, of_q, of_k = (
        x.cpu() for x in (starts.expand(batch, -1), rows, first, start, of_q, of_k)
    )
    refuse_restarts(starts, (of_q == of_k) & (length == kv_length))
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
    has_padding = always or table is not None
    sizes = (x.to(device, torch.int32) for x in (bounds_q, bounds_k, *((used_q, used_k) if has_padding else ())))
    cu_seqlens_q, cu_seqlens_k, *used = sizes
    longest = (int(x.diff().max()) for x in (bounds_q, bounds_k))
    return Packed(cu_seqlens_q, cu_seqlens_k, *(used or (None, None)), *longest)


def blocks(
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int | Tensor,
    function: Callable[..., Tensor],
    there: Tensor | None,
    device: torch.device | str,
) -> BlockMask:
    """Return any mask as a `BlockMask`.

    Args:
        q_offset, kv_offset: the positions of the first query and of the first key.
        function: the pairs of positions that are seen, padding aside.
        there: (batch, kv_length) bool, the keys that are no padding; None is all.
    """

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = function(b, h, q_idx + q_offset, kv_idx + kv_offset)
        return seen if there is None else seen & there[b, kv_idx]

    made = create_block_mask(mask_mod, batch, None, q_length, kv_length, device=device)
    if not torch.compiler.is_compiling():
        made.padding = there, q_offset - kv_offset  # for blocks_in_documents
    return made


def blocks_in_documents(
    mask: BlockMask, position_ids: Tensor, batch: int, q_length: int, kv_length: int
) -> BlockMask | None:
    """Return a mask that `blocks` made, within documents; None for other masks, and where each row is one document.

    Raises:
        ValueError: documents begin inside rows whose queries are not their keys.
    """
    if not hasattr(mask, "padding"):
        return None
    there, shift = mask.padding[0], int(mask.padding[1])
    keys = torch.arange(q_length) + shift
    kept = torch.ones(batch, q_length, dtype=torch.bool)
    if there is not None:
        kept = there.cpu()[:, keys.clamp(0, kv_length - 1)] & (keys >= 0) & (keys < kv_length)
    starts = starts_of(position_ids.cpu().expand(batch, -1), kept, torch.full((batch,), shift > 0))
    refuse_restarts(starts, torch.full((batch,), q_length == kv_length))
    if not bool((starts.sum(1) > 1).any()):
        return None
    document, inner = starts.cumsum(1).to(position_ids.device), mask.mask_mod

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return inner(b, h, q_idx, kv_idx) & (document[b, q_idx] == document[b, kv_idx])

    return create_block_mask(mask_mod, batch, None, q_length, kv_length, device=position_ids.device)


# What was found in the last forward passes: reading waits for the device, and the layers of a model share the result.
_MOST = 4  # kinds of masks in one model
_remembered: tuple[tuple[tuple, tuple, Any], ...] = ()


def remembered(make: Callable[[], Any], position_ids: Tensor, mask: Any, *key: Any) -> Any:
    """Return make(), or what it returned for the same objects with the same values."""
    global _remembered
    objects = (position_ids, mask)
    if any(isinstance(x, Tensor) and x.is_inference() for x in objects):  # these count no versions
        return make()
    state = tuple(x._version if isinstance(x, Tensor) else None for x in objects), key
    for found, at, result in _remembered:
        if at == state and all(ref() is x for ref, x in zip(found, objects)):
            return result
    result = make()
    refs = tuple((lambda: None) if x is None else weakref.ref(x) for x in objects)
    alive = tuple(x for x in _remembered if x[0][0]() is not None)
    _remembered = ((refs, state, result), *alive)[:_MOST]  # (another thread may replace it at the same time)
    return result


# Operators of compiled code -------------------------------------------------------------------------------------------


def compiled_documents(position_ids: Tensor, table: Tensor | None, batch: int, causal: bool) -> Packed:
    """Return the documents of a batch in compiled code, for as many keys as queries. Sizes are unbacked."""
    cu_q, cu_k, seqused_q, seqused_k, longest = torch.ops.fa4.documents(position_ids, table, batch, causal)
    if table is None:
        return Packed(cu_q, cu_k, None, None, longest.shape[0], longest.shape[1])
    return Packed(cu_q, cu_k, seqused_q, seqused_k, longest.shape[0], longest.shape[1])


def compiled_check(position_ids: Tensor, table: Tensor, kv_length: int) -> Tensor:
    """Return the table in compiled code, for keys of a cache. The call raises ValueError where positions restart."""
    return torch.ops.fa4.one_document(position_ids, table, kv_length)


def _documents(position_ids: Tensor, table: Tensor | None, batch: int, causal: bool) -> tuple[Tensor, ...]:
    found = cut(position_ids, table, batch, position_ids.shape[1], causal, position_ids.device, always=True)
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
    if not (table.is_cuda and torch.cuda.is_current_stream_capturing()):
        cut(position_ids, table, table.shape[3] // 2, kv_length, True, table.device)
    return table.clone()


def _one_document_fake(position_ids: Tensor, table: Tensor, kv_length: int) -> Tensor:
    return table.new_empty(table.shape)


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
    ("one_document", _one_document, _one_document_fake),
):
    ops.library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fa4::{_name}", _fake, lib=ops.library)


# Positions in the graphs of torch.compile -----------------------------------------------------------------------------

_counts_up = False


def look_for_arange(context: Any) -> None:
    """Note whether position_ids are made by torch.arange; runs while torch.compile traces _positions_count_up."""
    global _counts_up
    _counts_up = False
    for level in (1, 2):  # the function that asks, and its caller
        try:
            _counts_up = _is_arange(context.get_local("position_ids", stacklevel=level).as_proxy().node)
            return
        except Exception:  # the function has no position_ids, or torch has no such entry point
            continue


def found_to_count_up() -> bool:
    """Return what `look_for_arange` noted: a constant of the trace, for torch guards whether position_ids are given."""
    return _counts_up


def _is_arange(node: Any) -> bool:
    """Whether a node of a graph is torch.arange, perhaps with a number added and axes before it."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    if not isinstance(value, Tensor) or value._version:  # written to after it was made
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
