"""Checks of `sparse_attention`'s arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.spec import Flags
from ..torch_ops import checks as common
from ..torch_ops.checks import Options, check_int32, check_plain, shown
from .selection import Rule

PER = ("token", "block")


class Tensors(NamedTuple):
    """The tensors of a call, as the caller passed them."""

    q: Tensor
    k: Tensor
    v: Tensor
    indices: Tensor
    counts: Tensor | None
    sink: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    page_table: Tensor | None


class Sizes(NamedTuple):
    """batch; queries and keys: bounds of a sequence's."""

    batch: int
    queries: int
    keys: int


def rule(granularity: int, causal: bool, window: int | None) -> Rule:
    """Check how a list selects keys."""
    granularity = common.count("granularity", granularity)
    if not granularity:
        raise ValueError("granularity is 0, expected 1 or more keys of a block")
    causal = common.boolean("causal", causal, "a bool")
    return Rule(granularity, causal, None if window is None else common.count("window", window, "an int or None"))


def check(t: Tensors, rule: Rule, per: str, max_seqlens: tuple[Any, Any], options: Options) -> tuple[Sizes, Flags]:
    """Check a call; return its sizes and flags."""
    if per not in PER:
        raise ValueError(f"per is {per!r}, expected 'token' or 'block'")
    sizes = _check_layout(t, max_seqlens)
    if t.sink is not None:
        common.check_sink("sink", t.sink, t.q)
    flags = common.flags(t.q, t.k, t.v, None, options)
    if t.page_table is not None and torch.is_grad_enabled():
        for name in ("q", "k", "v", "sink"):
            x = getattr(t, name)
            if x is not None and x.requires_grad:
                repair = "and with a page_table there are no gradients: call it under torch.no_grad()"
                raise NotImplementedError(f"{name} requires grad, {repair}")
    leading, axes = _leading(t, rule, per, sizes)
    _check_lists(t, leading, axes)
    if common.checks_lengths(t.q.device.type) and not torch.compiler.is_compiling():
        _check_values(t)
    return sizes, flags


def _check_layout(t: Tensors, max_seqlens: tuple[Any, Any]) -> Sizes:
    packed_q, packed_k = t.cu_seqlens_q is not None, t.cu_seqlens_k is not None
    is_paged = t.page_table is not None
    if is_paged and packed_k:
        raise ValueError("cu_seqlens_k and page_table are both given, expected one: where the keys of a sequence are")
    if (packed_k and not packed_q) or (packed_q and not (packed_k or is_paged)):
        given, missing = ("cu_seqlens_q", "cu_seqlens_k") if packed_q else ("cu_seqlens_k", "cu_seqlens_q")
        raise ValueError(f"{given} is given without {missing}, expected both or none")
    if packed_k and t.seqused_k is not None:
        raise ValueError("seqused_k and cu_seqlens_k are both given, expected one")
    if is_paged and t.seqused_k is None:
        raise ValueError("page_table is given without seqused_k, expected it: the keys of each sequence")
    for name, x, packed in (("q", t.q, packed_q), ("k", t.k, packed_k), ("v", t.v, packed_k)):
        check_plain(name, x, t.q)
        rows = "pages, rows of a page" if is_paged and name != "q" else "total" if packed else "batch, seqlen"
        if x.ndim != rows.count(",") + 3:
            raise ValueError(f"{name} has {x.ndim} dimensions, shape {shown(x)}, expected ({rows}, heads, head_dim)")
        common.check_like(name, x, t.q, "q")
    q, k, v = t.q, t.k, t.v
    if not (q.shape[-2] and k.shape[-2]) or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"q has {q.shape[-2]} heads, expected a positive multiple of k's {k.shape[-2]}")
    plain = not (packed_q or is_paged)
    if k.shape[-1] != q.shape[-1] or (plain and k.shape[0] != q.shape[0]):
        rows = f"{q.shape[0]}, *" if plain else "total_k" if packed_k else "*, *"
        raise ValueError(f"k has shape {shown(k)}, expected ({rows}, *, {q.shape[-1]}) to go with q {shown(q)}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v has shape {shown(v)}, expected {shown(k, -1, '*')} to go with k {shown(k)}")
    batch = q.shape[0]
    if t.cu_seqlens_q is not None:
        batch = check_int32("cu_seqlens_q", t.cu_seqlens_q, q, None).shape[0] - 1
        queries = common.max_seqlen("max_seqlen_q", max_seqlens[0], q.shape[0])
    else:
        queries = q.shape[1]
        _refuse_bound("max_seqlen_q", max_seqlens[0], "cu_seqlens_q")
    if t.cu_seqlens_k is not None:
        check_int32("cu_seqlens_k", t.cu_seqlens_k, q, batch + 1)
    if t.seqused_k is not None:
        check_int32("seqused_k", t.seqused_k, q, batch)
    if t.page_table is not None:
        keys = _check_pages(t.page_table, k, q, batch)
    elif packed_k:
        keys = k.shape[0]
    else:
        keys = k.shape[1]
    if packed_k or is_paged:
        keys = min(common.max_seqlen("max_seqlen_k", max_seqlens[1], keys), keys)
    else:
        _refuse_bound("max_seqlen_k", max_seqlens[1], "cu_seqlens_k")
    return Sizes(batch, queries, keys)


def _refuse_bound(name: str, bound: Any, missing: str) -> None:
    if bound is not None:
        raise ValueError(f"{name} is given without {missing}")


def _check_pages(table: Tensor, k: Tensor, q: Tensor, batch: int) -> int:
    check_plain("page_table", table, q)
    if table.dtype != torch.int32:
        raise TypeError(f"page_table has dtype {table.dtype}, expected torch.int32")
    if table.ndim != 2 or table.shape[0] != batch:
        raise ValueError(f"page_table has shape {shown(table)}, expected ({batch}, *): a row for each sequence of q")
    if k.shape[1] == 0:
        raise ValueError(f"k has shape {shown(k)}, expected pages of at least 1 row")
    return table.shape[1] * k.shape[1]


def _leading(t: Tensors, rule: Rule, per: str, sizes: Sizes) -> tuple[tuple[int, ...], str]:
    """Return the expected sizes of indices before the axis of lists, and their names."""
    if per == "token":
        return t.q.shape[:-2], "total_q" if t.cu_seqlens_q is not None else "batch, seqlen_q"
    blocks = -(-sizes.queries // rule.granularity)
    return (sizes.batch, blocks), "batch, blocks of queries"


def _check_lists(t: Tensors, leading: tuple[int, ...], axes: str) -> None:
    indices, counts = t.indices, t.counts
    check_plain("indices", indices, t.q, "an int32 torch.Tensor")
    if indices.dtype != torch.int32:
        raise TypeError(f"indices has dtype {indices.dtype}, expected torch.int32")
    heads, keys = t.q.shape[-2], t.k.shape[-2]
    sizes = sorted({1, heads, keys})
    if indices.ndim != len(leading) + 2 or tuple(indices.shape[:-2]) != tuple(leading):
        expected = f"({', '.join(map(str, leading))}, lists, n)"
        raise ValueError(f"indices has shape {shown(indices)}, expected {expected}: ({axes}, lists, n)")
    if indices.shape[-2] not in sizes:
        number = " or ".join(map(str, sizes))
        raise ValueError(
            f"indices has {indices.shape[-2]} lists, expected {number}: one, or one for each head of k or q"
        )
    if counts is None:
        return
    check_plain("counts", counts, t.q, "an int32 torch.Tensor")
    if counts.dtype != torch.int32:
        raise TypeError(f"counts has dtype {counts.dtype}, expected torch.int32")
    if counts.shape != indices.shape[:-1]:
        raise ValueError(
            f"counts has shape {shown(counts)}, expected {shown(indices, -1)}: indices without its last axis"
        )


def _check_values(t: Tensors) -> None:
    """Raise ValueError for a wrong number of a block or count."""
    indices, counts = t.indices, t.counts
    n = indices.shape[-1]
    if counts is not None and counts.numel():
        low, high = int(counts.min()), int(counts.max())
        if low < 0 or high > n:
            raise ValueError(f"counts has {low if low < 0 else high}, expected 0 to the {n} entries of a list")
    if t.cu_seqlens_q is not None:
        common.lengths_of("cu_seqlens_q", t.cu_seqlens_q, t.q.shape[0])
    if t.cu_seqlens_k is not None:
        common.lengths_of("cu_seqlens_k", t.cu_seqlens_k, t.k.shape[0])
    if not indices.numel():
        return
    if counts is not None:
        is_read = torch.arange(n, device=indices.device) < counts[..., None]
        indices = torch.where(is_read, indices, -1)
    if int(indices.min()) < -1:
        raise ValueError(f"indices has {int(indices.min())}, expected 0 or more, or -1 for none")
