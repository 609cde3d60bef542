"""Checks of the indexer's arguments, and the problem that they describe."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..runtime.spec import compute_dtype
from ..torch_ops import checks
from ..torch_ops.checks import check_dtype, check_int32, check_plain, shown
from .loss import Target
from .problem import Bounds, Problem

E4M3 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16, E4M3, torch.float32, torch.float64)


class Lengths(NamedTuple):
    """Lengths and pages of a call, as the caller passed them."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | Tensor | None = None
    max_seqlen_k: int | Tensor | None = None
    page_table: Tensor | None = None
    seqused_k: Tensor | None = None


def problem(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    causal: bool,
    lengths: Lengths,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Problem:
    """Check a call and return its problem. dtypes: those that q and k may have."""
    _check_form(lengths)
    _check_tensors(q, k, weights, lengths, dtypes)
    checks.boolean("causal", causal, "a bool")
    _check_descales(q, k, q_descale, k_descale)
    batch = _check_lengths(q, k, lengths)
    bounds, columns = _bounds(q, k, lengths, batch)
    weights = weights.to(compute_dtype(q.dtype))
    if q_descale is not None:
        weights = weights * (q_descale.reshape(()) if q_descale.numel() == 1 else q_descale)
    if k_descale is not None:
        k_descale = k_descale.reshape(()).expand(k.shape[:-1]) if k_descale.numel() == 1 else k_descale
    if lengths.cu_seqlens_q is None:
        q, weights = q.flatten(0, 1), weights.flatten(0, 1)
    if lengths.page_table is None and lengths.cu_seqlens_k is None:
        k = k.flatten(0, 1)
        k_descale = None if k_descale is None else k_descale.flatten(0, 1)
    return Problem(q, k, weights, k_descale, bounds, lengths.page_table, columns, causal)


def needs_gradients(q: Tensor, k: Tensor, weights: Tensor, page_table: Tensor | None) -> bool:
    """Return whether a call needs gradients; raise if it cannot have them."""
    if not torch.is_grad_enabled():
        return False
    for name, x in (("q", q), ("k", k), ("weights", weights)):
        if x.requires_grad:
            if q.dtype == E4M3:
                raise NotImplementedError(f"{name} requires grad, and e4m3 q and k have no gradients")
            if page_table is not None:
                raise NotImplementedError(f"{name} requires grad, and a call with page_table has no gradients")
            return True
    return False


def target(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    attn_q: Tensor,
    attn_k: Tensor,
    attn_lse: Tensor,
    softmax_scale: float | None,
    indices: Tensor | None,
) -> Target:
    """Check the attention beside q and k, as the caller passed them, and return it as a target."""
    for name, x, like, other in (("attn_q", attn_q, "q", q), ("attn_k", attn_k, "k", k)):
        check_plain(name, x, q)
        check_dtype(name, x)
        rows = other.shape[:-2] if like == "q" else other.shape[:-1]
        if x.ndim != len(rows) + 2 or x.shape[:-2] != rows or x.shape[-1] == 0:
            expected = ", ".join(map(str, (*rows, "heads", "dim")))
            raise ValueError(f"{name} has shape {shown(x)}, expected ({expected}) beside {like} {shown(other)}")
    if attn_k.dtype != attn_q.dtype:
        raise TypeError(f"attn_k has dtype {attn_k.dtype}, expected {attn_q.dtype} like attn_q")
    if attn_k.shape[-1] != attn_q.shape[-1]:
        raise ValueError(f"attn_k has dim {attn_k.shape[-1]}, expected {attn_q.shape[-1]} like attn_q")
    if attn_k.shape[-2] == 0 or attn_q.shape[-2] == 0 or attn_q.shape[-2] % attn_k.shape[-2]:
        text = f"expected a positive multiple of attn_k's {attn_k.shape[-2]}"
        raise ValueError(f"attn_q has {attn_q.shape[-2]} heads, {text}")
    check_plain("attn_lse", attn_lse, q)
    check_dtype("attn_lse", attn_lse, (torch.float32, torch.float64))
    rows = q.shape[:-2]
    expected_lse = (*rows[:-1], attn_q.shape[-2], rows[-1])
    if attn_lse.shape != expected_lse:
        raise ValueError(f"attn_lse has shape {shown(attn_lse)}, expected {expected_lse} beside attn_q {shown(attn_q)}")
    if indices is not None:
        check_plain("indices", indices, q, "an int32 torch.Tensor")
        if indices.dtype != torch.int32:
            raise TypeError(f"indices has dtype {indices.dtype}, expected torch.int32")
        if indices.ndim != len(rows) + 1 or indices.shape[:-1] != rows:
            expected = ", ".join(map(str, (*rows, "topk")))
            raise ValueError(f"indices has shape {shown(indices)}, expected ({expected})")
    scale = attn_q.shape[-1] ** -0.5 if softmax_scale is None else checks.number("softmax_scale", softmax_scale)
    lse = attn_lse.mT
    if q.ndim == 4:
        attn_q, attn_k, lse = (x.flatten(0, 1) for x in (attn_q, attn_k, lse))
        indices = None if indices is None else indices.flatten(0, 1)
    return Target(attn_q.detach(), attn_k.detach(), lse.detach(), scale, indices)


def _check_form(x: Lengths) -> None:
    """Raise unless the lengths belong together."""
    if x.page_table is not None:
        if x.cu_seqlens_k is not None:
            raise ValueError("cu_seqlens_k is given with page_table, expected seqused_k: pages are not packed")
        if x.seqused_k is None:
            raise ValueError("seqused_k is None with page_table, expected (batch,) int32: the keys of each sequence")
    elif (x.cu_seqlens_q is None) != (x.cu_seqlens_k is None):
        given, missing = "cu_seqlens_q", "cu_seqlens_k"
        if x.cu_seqlens_q is None:
            given, missing = missing, given
        raise ValueError(f"{given} is given without {missing}, expected both or none")
    if x.max_seqlen_q is not None and x.cu_seqlens_q is None:
        raise ValueError("max_seqlen_q is given without cu_seqlens_q")
    if x.max_seqlen_k is not None and x.cu_seqlens_k is None and x.page_table is None:
        raise ValueError("max_seqlen_k is given without cu_seqlens_k or page_table")


def _check_tensors(q: Tensor, k: Tensor, weights: Tensor, lengths: Lengths, dtypes: tuple[torch.dtype, ...]) -> None:
    axes_q = "(batch, seqlen_q, heads, head_dim)" if lengths.cu_seqlens_q is None else "(total_q, heads, head_dim)"
    axes_k = "(batch, seqlen_k, head_dim)"
    if lengths.page_table is not None:
        axes_k = "(pages, page_size, head_dim)"
    elif lengths.cu_seqlens_k is not None:
        axes_k = "(total_k, head_dim)"
    for name, x, axes in (("q", q, axes_q), ("k", k, axes_k)):
        check_plain(name, x, q)
        if x.ndim != axes.count(",") + 1:
            raise ValueError(f"{name} has shape {shown(x)}, expected {axes}")
        checks.check_like(name, x, q, "q", dtypes=dtypes)
    if q.shape[-2] == 0:
        raise ValueError(f"q has shape {shown(q)}, expected at least one head")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head_dim {k.shape[-1]}, expected {q.shape[-1]} like q")
    if lengths.page_table is None and lengths.cu_seqlens_q is None and k.shape[0] != q.shape[0]:
        raise ValueError(f"k has shape {shown(k)}, expected ({q.shape[0]}, *, {q.shape[-1]}) to go with q {shown(q)}")
    check_plain("weights", weights, q)
    # float32 keeps the sum over heads exact to its rounding; other dtypes are those of q in training.
    expected = {torch.float32, compute_dtype(q.dtype)} | ({q.dtype} if q.dtype.itemsize > 1 else set())
    check_dtype("weights", weights, tuple(sorted(expected, key=str)))
    if weights.shape != q.shape[:-1]:
        raise ValueError(f"weights has shape {shown(weights)}, expected {shown(q, -1)} to go with q {shown(q)}")


def _check_descales(q: Tensor, k: Tensor, q_descale: Tensor | None, k_descale: Tensor | None) -> None:
    for label, scales, name, x in (("q_descale", q_descale, "q", q), ("k_descale", k_descale, "k", k)):
        if scales is None:
            continue
        check_plain(label, scales, q)
        if x.dtype != E4M3:
            raise ValueError(f"{label} is given with {name} of dtype {x.dtype}, expected it with {E4M3} alone")
        check_dtype(label, scales, (torch.float32,))
        if scales.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(f"{label} requires grad, and scales have no gradients: pass {label}.detach()")
        if scales.numel() != 1 and scales.shape != x.shape[:-1]:
            raise ValueError(f"{label} has shape {shown(scales)}, expected one element or {shown(x, -1)} beside {name}")


def _check_lengths(q: Tensor, k: Tensor, x: Lengths) -> int:
    """Check shapes of lengths and pages. Returns the batch size."""
    batch = q.shape[0]
    if x.cu_seqlens_q is not None:
        batch = check_int32("cu_seqlens_q", x.cu_seqlens_q, q, None).shape[0] - 1
    if x.cu_seqlens_k is not None:
        check_int32("cu_seqlens_k", x.cu_seqlens_k, q, batch + 1)
    if x.seqused_k is not None:
        check_int32("seqused_k", x.seqused_k, q, batch)
    if x.page_table is not None:
        check_plain("page_table", x.page_table, q, "an int32 torch.Tensor")
        if x.page_table.dtype != torch.int32:
            raise TypeError(f"page_table has dtype {x.page_table.dtype}, expected torch.int32")
        if x.page_table.ndim != 2 or x.page_table.shape[0] != batch:
            raise ValueError(f"page_table has shape {shown(x.page_table)}, expected ({batch}, pages of a sequence)")
        if k.shape[1] == 0:
            raise ValueError(f"k has shape {shown(k)}, expected pages of at least one row")
    return batch


def _bounds(q: Tensor, k: Tensor, x: Lengths, batch: int) -> tuple[Bounds, int]:
    """Return where sequences begin and end, and the columns of the scores."""
    options = dict(dtype=torch.int32, device=q.device)
    if x.cu_seqlens_q is None:
        q_begin = torch.arange(batch + 1, **options) * q.shape[1]
    else:
        q_begin = x.cu_seqlens_q
    if x.page_table is not None:
        assert x.seqused_k is not None
        capacity = x.page_table.shape[1] * k.shape[1]
        columns = capacity if x.max_seqlen_k is None else checks.max_seqlen("max_seqlen_k", x.max_seqlen_k, capacity)
        k_begin, k_count, rooms = torch.zeros(batch, **options), x.seqused_k, [capacity] * batch
    elif x.cu_seqlens_k is not None:
        columns = checks.max_seqlen("max_seqlen_k", x.max_seqlen_k, k.shape[0])
        k_begin, k_count, rooms = x.cu_seqlens_k[:-1], x.cu_seqlens_k.diff(), None
    else:
        columns = k.shape[1]
        k_begin = torch.arange(batch, **options) * columns
        k_count, rooms = torch.full((batch,), columns, **options), [columns] * batch
    if checks.checks_lengths(q.device.type):
        _check_values(q, k, x, columns, rooms)
    k_count = k_count if x.seqused_k is None else x.seqused_k.minimum(k_count)
    return Bounds(q_begin, k_begin, k_count.clamp(0, columns)), columns


def _check_values(q: Tensor, k: Tensor, x: Lengths, columns: int, rooms: list[int] | None) -> None:
    """Check the values of lengths and pages. rooms: rows of k for each sequence; None if they are packed."""
    if x.cu_seqlens_q is not None:
        longest = max(checks.lengths_of("cu_seqlens_q", x.cu_seqlens_q, q.shape[0]), default=0)
        bound = checks.max_seqlen("max_seqlen_q", x.max_seqlen_q, q.shape[0])
        if longest > bound:
            raise ValueError(f"max_seqlen_q is {bound}, expected at least {longest}, the longest sequence")
    if x.cu_seqlens_k is not None:
        rooms = checks.lengths_of("cu_seqlens_k", x.cu_seqlens_k, k.shape[0])
    assert rooms is not None
    used = rooms if x.seqused_k is None else x.seqused_k.tolist()
    if any(not 0 <= n <= room for n, room in zip(used, rooms)):
        raise ValueError(f"seqused_k is {used}, expected 0 to the sequence lengths {rooms}")
    if max(used, default=0) > columns:
        raise ValueError(f"max_seqlen_k is {columns}, expected at least {max(used)}, the longest sequence")
    if x.page_table is not None:
        for row, count in zip(x.page_table.tolist(), used):
            for page in row[: -(-count // k.shape[1])]:
                if not 0 <= page < k.shape[0]:
                    raise ValueError(f"page_table has page {page}, expected 0 to {k.shape[0] - 1}")
