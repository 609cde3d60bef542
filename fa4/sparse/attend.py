"""Attention of each query to the rows of its own list, and its gradients.

Forward: by a kernel for lists, if the chip has one for the call (`native`). Otherwise a query with the heads that
share a list is a sequence of one token in a cache with pages of one row, and the list is its page table. Backward: by
a kernel for lists, if the chip has one. Otherwise K and V of some queries are gathered, the usual backward runs with
the heads of a query as its rows, and the gradients of gathered rows are added to those of the rows they came from.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..bwd.launchers import ORDERED_SUMS, OrderedSumsConfig
from ..fwd.launchers import SELECT, SelectConfig
from ..kvcache import flash_attn_with_kvcache
from ..runtime.device import chip_of
from ..runtime.jit import can_run_kernels
from ..runtime.spec import AttentionInputs, Flags, Saved, compute_dtype
from ..torch_ops import ops
from ..torch_ops.autograd import second_derivative
from ..torch_ops.run import prepare
from . import native
from .selection import Layout, Places, Rule, in_memory, selected_rows

LISTED_ROWS = 1 << 24  # numbers of rows in lists at a time, 4 bytes each and some more while they are made
GATHERED_NUMBERS = 1 << 27  # numbers of K, V, dK and dV that a backward holds of gathered rows


class Heads(NamedTuple):
    """How heads go to lists: a list serves all heads, or the heads of a part of the key/value heads, or a part of the
    query heads of one key/value head."""

    lists: int
    query: int
    key: int

    @property
    def group(self) -> int:
        """Query heads of a key/value head of a list."""
        return self.query // (self.lists * self.keys_of_list)

    @property
    def keys_of_list(self) -> int:
        return max(self.key // self.lists, 1)

    def key_rows(self, rows: Tensor) -> Tensor:
        """Return where the rows are in k with its heads flattened into rows, if a list has one key/value head."""
        if self.lists == 1:
            return rows
        head = torch.arange(self.lists, device=rows.device, dtype=torch.int32) * self.key // self.lists
        return rows * self.key + head[:, None]

    def by_list(self, x: Tensor) -> Tensor:
        """View (tokens, query heads, columns) as (tokens x lists, query heads of a list, columns)."""
        return x.reshape(x.shape[0] * self.lists, self.query // self.lists, *x.shape[2:])

    def of_rows(self, x: Tensor) -> Tensor:
        """View flattened k or v as rows that lists number, (rows, key/value heads of a list, columns)."""
        return x.reshape(-1, self.keys_of_list, x.shape[-1])


class Pattern(NamedTuple):
    """What each query attends to. indices, counts: of flattened queries, see `selected_rows`."""

    indices: Tensor
    counts: Tensor | None
    rule: Rule
    layout: Layout

    @property
    def lists(self) -> int:
        return self.indices.shape[1]

    @property
    def keep(self) -> int:
        """At least the keys that a query attends to."""
        return min(self.rule.width(self.indices.shape[2]), self.layout.keys)

    def rows(self, first: int, stop: int, heads: Heads, by_kernel: bool) -> tuple[Tensor, Tensor]:
        """Return the rows of the queries `first` to `stop` - 1 in k, as `Heads.of_rows` flattens it, and their
        numbers. Rows past these numbers are any."""
        indices, counts = self.indices[first:stop], None if self.counts is None else self.counts[first:stop]
        if by_kernel:
            return _rows_by_kernel(indices, counts, self.rule, self.layout, self.keep, first, heads)
        places = Places.of(self.layout, first, stop, indices.device)
        rows, count = selected_rows(indices, counts, places, self.rule, self.keep)
        return heads.key_rows(in_memory(rows, places, self.layout)), count


def _rows_by_kernel(
    indices: Tensor, counts: Tensor | None, rule: Rule, layout: Layout, keep: int, first: int, heads: Heads
) -> tuple[Tensor, Tensor]:
    cfg = SelectConfig(
        rule.granularity, rule.causal, rule.window is not None, counts is not None, layout.cu_seqlens_q is not None,
        layout.cu_seqlens_k is not None, layout.seqused_k is not None, layout.page_size, heads.lists > 1,  # type: ignore[arg-type]
    )  # fmt: skip
    rows = indices.new_empty(*indices.shape[:2], keep)
    kept = indices.new_empty(indices.shape[:2])
    of_layout = layout.cu_seqlens_q, layout.cu_seqlens_k, layout.seqused_k, layout.page_table
    tensors = (indices, counts, *of_layout, rows, kept)
    numbers = (first, layout.queries, layout.keys, rule.window or 0, heads.key)
    with prepare.on_device(indices.device):
        SELECT.launcher(cfg, chip_of(indices.device))(tensors, numbers)
    return rows, kept


def _has_kernel(q: Tensor, backend: str) -> bool:
    """Whether kernels make the lists of rows. Compiled code holds torch's operators alone."""
    if backend == "torch" or torch.compiler.is_compiling():
        return False
    chip = chip_of(q.device)
    return chip.number >= 80 and can_run_kernels(chip)


def attend(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, pattern: Pattern, flags: Flags
) -> tuple[Tensor, Tensor]:
    """Return out (tokens, heads_q, head_dim_v) and lse (tokens, heads_q), differentiable in q, k, v and the sink.

    q: (tokens, heads_q, head_dim). k, v: (rows, heads_kv, head_dim or head_dim_v). sink: (heads_q,).
    """
    return _Sparse.apply(q, k, v, sink, pattern, flags)


def forward(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, flags: Flags) -> tuple[Tensor, Tensor]:
    """Compute `attend`."""
    heads, by_kernel = Heads(pattern.lists, q.shape[1], k.shape[1]), _has_kernel(q, flags.backend)
    if not (pattern.keep and q.numel() and k.shape[0] and pattern.layout.batch):
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=compute_dtype(q.dtype))
        return q.new_zeros(*q.shape[:2], v.shape[-1]), lse
    parts = q.shape[0] * pattern.lists * heads.keys_of_list
    backend = native.forward_backend_of(q, k, v, heads.group, parts, flags) if by_kernel else None
    k_rows, v_rows = heads.of_rows(k)[:, None], heads.of_rows(v)[:, None]
    step = max(LISTED_ROWS // (pattern.keep * pattern.lists), 1)
    results = []
    for first in range(0, q.shape[0], step):
        rows, count = pattern.rows(first, min(first + step, q.shape[0]), heads, by_kernel)
        if backend is not None:
            q_part, k_part = q[first : first + step], k_rows[:, 0]
            results.append(native.forward(backend, q_part, k_part, rows, count, v.shape[-1], flags.softmax_scale))
            continue
        out, lse = flash_attn_with_kvcache(
            heads.by_list(q[first : first + step])[:, None], k_rows, v_rows, page_table=rows.flatten(0, 1),
            cache_seqlens=count.flatten(), softmax_scale=flags.softmax_scale, return_lse=True, backend=flags.backend,
        )  # fmt: skip
        results.append((out.view(-1, q.shape[1], v.shape[-1]), lse.view(-1, q.shape[1])))
    out, lse = results[0] if len(results) == 1 else map(torch.cat, zip(*results))
    return out, lse


def backward(
    saved: Saved, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, flags: Flags
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of `attend`. saved: shaped as its results."""
    heads, by_kernel = Heads(pattern.lists, q.shape[1], k.shape[1]), _has_kernel(q, flags.backend)
    dtype = compute_dtype(q.dtype)
    has_pairs = bool(pattern.keep and q.numel() and k.shape[0] and pattern.layout.batch)
    dq = (torch.empty if has_pairs else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
    sums = [torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v)]
    if has_pairs:
        backend = native.backend_of(q, k, v, heads.group, flags)
        if flags.deterministic and not by_kernel:
            backend = None
        columns = pattern.keep * pattern.lists * heads.keys_of_list * (k.shape[-1] + v.shape[-1])
        if backend is None:
            step = GATHERED_NUMBERS // (2 * columns)
        else:
            step = GATHERED_NUMBERS // columns if flags.deterministic else LISTED_ROWS // (pattern.keep * pattern.lists)
        step = max(step, 1)
        k_rows, v_rows, *totals = (heads.of_rows(x) for x in (k, v, *sums))
        for first in range(0, q.shape[0], step):
            part = slice(first, first + step)
            of_part = Saved(*(None if x is None else x[part] for x in saved))  # type: ignore[arg-type]
            rows, count = pattern.rows(first, min(first + step, q.shape[0]), heads, by_kernel)
            if backend is None:
                dq[part] = _backward_of(of_part, q[part], k, v, heads, rows, count, flags, sums, by_kernel)
                continue
            targets = totals
            if flags.deterministic:
                targets = [x.new_empty(rows.numel(), *x.shape[1:]) for x in totals]
            keys = k_rows, v_rows, rows, count
            native.backward(
                backend, of_part, q[part], *keys, flags.softmax_scale, dq[part], targets, flags.deterministic
            )
            if flags.deterministic:
                _add_in_order(totals, rows, count, targets)
    return dq, *(total.to(x.dtype) for total, x in zip(sums, (k, v)))  # type: ignore[return-value]


def _backward_of(
    saved: Saved, q: Tensor, k: Tensor, v: Tensor, heads: Heads, rows: Tensor, count: Tensor, flags: Flags,
    sums: list[Tensor], by_kernel: bool,
) -> Tensor:  # fmt: skip
    """Return dq of some queries; add their part of dk and dv to `sums`."""
    lists, per = q.shape[0] * heads.lists, heads.keys_of_list
    is_used = torch.arange(rows.shape[2], device=q.device) < count[..., None]
    numbers = torch.where(is_used, rows, 0).flatten()
    k_rows, v_rows = (heads.of_rows(x)[numbers].view(lists, -1, per, x.shape[-1]) for x in (k, v))

    def by_rows(x: Tensor) -> Tensor:
        """(tokens, heads_q, columns) -> (lists, query heads of a key/value head, key/value heads of a list, columns)"""
        return heads.by_list(x).unflatten(1, (per, -1)).transpose(1, 2)

    lse, dlse = (
        None if x is None else heads.by_list(x).unflatten(1, (per, -1)).contiguous() for x in (saved.lse, saved.dlse)
    )
    of_lists = Saved(by_rows(saved.out).contiguous(), lse, by_rows(saved.dout).contiguous(), dlse)  # type: ignore[arg-type]
    q_rows = by_rows(q)
    inputs = AttentionInputs(
        q_rows, k_rows, v_rows, seqused_k=count.flatten(), max_seqlen_q=q_rows.shape[1], max_seqlen_k=k_rows.shape[1]
    )
    (dq, dk, dv, _), _ = ops.backward(of_lists, inputs, None, flags)
    totals, gradients = [heads.of_rows(x) for x in sums], [x.reshape(-1, *x.shape[2:]) for x in (dk, dv)]
    if flags.deterministic and by_kernel and _has_vectors(gradients):
        _add_in_order(totals, rows, count, gradients)
    else:
        # Rows past a list's end have gradients 0. Adding these to different rows is faster than to one.
        unused = torch.arange(numbers.shape[0], device=q.device, dtype=numbers.dtype) % totals[0].shape[0]
        numbers = torch.where(is_used.flatten(), numbers, unused)
        for total, x in zip(totals, gradients):
            _add_rows(total, numbers, x, flags.deterministic)
    return dq.transpose(1, 2).reshape(q.shape)


def _add_rows(total: Tensor, numbers: Tensor, rows: Tensor, deterministic: bool) -> None:
    """Add rows to those of `total` that `numbers` tells; in a fixed order, if deterministic."""
    rows = rows.to(total.dtype)
    if deterministic and total.is_cuda:  # torch sorts the numbers and adds equal ones in order
        total.index_put_((numbers,), rows, accumulate=True)
    else:
        total.index_add_(0, numbers, rows)


def _has_vectors(rows: list[Tensor]) -> bool:
    """Whether `_add_in_order` can load these rows."""
    return all(x.dtype.itemsize in (2, 4) and x.shape[-1] % 8 == 0 for x in rows)


def _add_in_order(totals: list[Tensor], rows: Tensor, count: Tensor, gradients: list[Tensor]) -> None:
    """Add gradients of listed rows to those of the rows in `totals`, in the order of the lists, by a kernel.

    totals: (rows, key/value heads of a list, columns) float32. rows, count: see `Pattern.rows`. gradients: a row for
    each entry of the lists; those of entries that are not used are not read.
    """
    keys = totals[0].shape[0]
    is_used = torch.arange(rows.shape[-1], device=rows.device) < count[..., None]
    numbers, order = torch.where(is_used, rows, keys).flatten().sort(stable=True)
    order = order.int()
    starts = torch.searchsorted(
        numbers, torch.arange(keys + 1, device=rows.device, dtype=numbers.dtype), out_int32=True
    )
    with prepare.on_device(rows.device):
        for total, x in zip(totals, gradients):
            cfg = OrderedSumsConfig(x.dtype, x.shape[-1])
            ORDERED_SUMS.launcher(cfg, chip_of(x.device))((x, order, starts, total))


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor, cu_seqlens_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add the sink to results without it."""
    logit = sink.to(lse.dtype)
    share = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - logit))
    with_sink = torch.logaddexp(lse, logit)
    if cu_seqlens_q is not None:  # rows past the last sequence have none
        is_used = torch.arange(lse.shape[0], device=lse.device) < cu_seqlens_q[-1]
        with_sink = torch.where(is_used[:, None], with_sink, lse)
    return (out * share[..., None]).to(out.dtype), with_sink


def _sink_gradient(saved: Saved, sink: Tensor) -> Tensor:
    """Return -sum over the tokens of exp(sink - lse) (dout . out - dlse)."""
    share = torch.where(saved.lse == -torch.inf, 0.0, torch.exp(sink.to(saved.lse.dtype) - saved.lse))
    delta = (saved.dout.to(share.dtype) * saved.out.to(share.dtype)).sum(-1)
    if saved.dlse is not None:
        delta = delta - torch.where(share == 0.0, 0.0, saved.dlse)  # that of rows with lse -inf means nothing
    return -(share * delta).sum(0).to(sink.dtype)


class _Sparse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, pattern: Pattern, flags: Flags
    ) -> tuple[Tensor, Tensor]:
        out, lse = forward(q, k, v, pattern, flags)
        layout = pattern.layout
        if sink is not None:
            out, lse = _with_sink(out, lse, sink, layout.cu_seqlens_q)
        ctx.set_materialize_grads(False)
        ctx.flags, ctx.rule, ctx.sizes, ctx.page_size = flags, pattern.rule, layout[:3], layout.page_size
        ctx.save_for_backward(out, lse, q, k, v, sink, pattern.indices, pattern.counts, *layout[3:7])
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * 6
        out, lse, q, k, v, sink, indices, counts, *of_layout = ctx.saved_tensors
        (batch, queries, keys), (cu_seqlens_q, cu_seqlens_k, used, table) = ctx.sizes, of_layout
        layout = Layout(batch, queries, keys, cu_seqlens_q, cu_seqlens_k, used, table, ctx.page_size)
        pattern = Pattern(indices, counts, ctx.rule, layout)
        dout = torch.zeros_like(out) if dout is None else dout
        return *_SparseBackward.apply(out, lse, dout, dlse, q, k, v, sink, pattern, ctx.flags), None, None


class _SparseBackward(torch.autograd.Function):
    """The backward as a function whose own backward raises."""

    @staticmethod
    def forward(
        ctx: Any, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
        sink: Tensor | None, pattern: Pattern, flags: Flags,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        # P of the backward is exp(scores - lse), so nothing but lse and out tells it of the sink.
        saved = Saved(out, lse, dout, dlse)
        dsink = None if sink is None else _sink_gradient(saved, sink)
        return *backward(saved, q, k, v, pattern, flags), dsink

    backward = staticmethod(second_derivative)
