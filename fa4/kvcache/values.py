"""Checks of values that kernels rely on: lengths, page numbers and factors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..runtime import nvfp4
from ..runtime.spec import AttentionInputs, Cache, Flags
from ..torch_ops.checks import checks_lengths, lengths_of
from .checks import Tensors
from .record import AppendArguments


def check_values(t: Tensors, flags: Flags, max_seqlens: tuple[int, int], table: str) -> None:
    """Raise ValueError for a wrong value, where reading is free or FA4_CHECK_LENGTHS=1 requests it.

    flags, max_seqlens: those of the call, whose shapes and options are checked. table: name under which the caller
    passed page_table.
    """
    if t.k is not None and t.k_cache is t.v_cache:
        raise ValueError(_SHARED.format("k_cache", "v_cache"))
    if t.k is not None and t.k_descale is t.v_descale and t.k_cache.dtype is nvfp4.DTYPE:
        raise ValueError(_SHARED.format(*_SCALES))
    if checks_lengths(t.q.device.type):
        if t.k is not None:
            _check_memory(t.k_cache, t.v_cache)
            if t.k_cache.dtype is nvfp4.DTYPE:
                _check_memory(t.k_descale, t.v_descale, _SCALES)
        _check(t, flags.window_left is None and flags.window_right is None, max_seqlens, table)


def check_append(a: AppendArguments) -> None:
    """Check values in the append operator, because compiled code has no values before. `check_attention` checks left
    padding and length bounds, which are missing here."""
    _check_memory(a.k_cache, a.v_cache)
    _check_memory(a.k_scales, a.v_scales, _SCALES)
    if not checks_lengths(a.q.device.type):
        return
    t = Tensors(
        a.q, a.k_cache, a.v_cache, a.k, a.v, a.cos, a.sin, a.rotary_seqlens, a.cache_seqlens, a.batch_idx, None,
        a.page_table, a.cu_seqlens_q, a.cu_seqlens_k_new, a.k_descale, a.v_descale,
    )  # fmt: skip
    rows = a.q.shape[1] if a.cu_seqlens_q is None else a.q.shape[0]
    _check(t, a.same_position, (rows, t.capacity), "page_table")


def check_attention(inputs: AttentionInputs, cache: Cache) -> None:
    """Check values in the operator that attends to a cache, after new rows are appended."""
    if not checks_lengths(inputs.q.device.type):
        return
    t = Tensors(
        *inputs[:3], cache_seqlens=inputs.seqused_k, cache_batch_idx=cache.batch_idx, cache_leftpad=cache.leftpad,
        page_table=cache.page_table, cu_seqlens_q=inputs.cu_seqlens_q, k_descale=cache.k_descale,
        v_descale=cache.v_descale,
    )  # fmt: skip
    _check(t, False, inputs.max_seqlens, "page_table")


_SCALES = "k_descale", "v_descale"
_SHARED = "{} and {} are the same memory, expected one of its own for each where new rows are appended"


def _check_memory(k: Tensor | None, v: Tensor | None, names: tuple[str, str] = ("k_cache", "v_cache")) -> None:
    if k is not None and v is not None and k.numel() and k.data_ptr() == v.data_ptr() and k.shape == v.shape:
        raise ValueError(_SHARED.format(*names))


def _check(t: Tensors, same_position: bool, max_seqlens: tuple[int, int], table: str) -> None:
    """same_position: all of a sequence's queries have the position of its first new row."""
    queries, capacity = _rows(t.q, t.batch, "cu_seqlens_q", t.cu_seqlens_q), t.capacity
    new = [0] * t.batch if t.k is None else _rows(t.k, t.batch, "cu_seqlens_k_new", t.cu_seqlens_k_new)
    if max(queries, default=0) > max_seqlens[0]:
        raise ValueError(f"max_seqlen_q is {max_seqlens[0]}, expected at least {max(queries)}, the longest sequence")
    before = t.cache_seqlens.tolist() if isinstance(t.cache_seqlens, Tensor) else [t.cache_seqlens or 0] * t.batch
    if any(n < 0 or n + more > capacity for n, more in zip(before, new)):
        also = f" with {new} new rows" if any(new) else ""
        raise ValueError(f"cache_seqlens is {before}{also}, expected 0 to the {capacity} rows of the cache")
    after = [n + more for n, more in zip(before, new)]
    if t.cache_seqlens is None:
        after = [capacity] * t.batch
    pads = [0] * t.batch if t.cache_leftpad is None else t.cache_leftpad.tolist()
    if any(not 0 <= pad <= n for pad, n in zip(pads, after)):
        raise ValueError(f"cache_leftpad is {pads}, expected 0 to the rows in use, {after}")
    longest = max((n - pad for n, pad in zip(after, pads)), default=0)
    if longest > max_seqlens[1]:
        raise ValueError(f"max_seqlen_k is {max_seqlens[1]}, expected at least {longest}, the longest sequence")
    if t.cache_batch_idx is not None:
        _check_batch_idx(t.cache_batch_idx.tolist(), t.k_cache.shape[0], any(new))
    if t.page_table is not None:
        _check_page_numbers(table, t.page_table, after, t.k_cache)
        _check_written_pages(table, t.page_table, [*map(range, pads, after)], new, t.k_cache.shape[1])
    if t.rotary_cos is not None:
        _check_positions(t, before, new, queries, same_position)
    for name, descale in (("q_descale", t.q_descale), ("k_descale", t.k_descale), ("v_descale", t.v_descale)):
        _check_descale(name, descale)


def _rows(x: Tensor, batch: int, name: str, cu_seqlens: Tensor | None) -> list[int]:
    """Return the rows of each sequence in x, padded or packed. name: that of cu_seqlens."""
    return [x.shape[1]] * batch if cu_seqlens is None else lengths_of(name, cu_seqlens, x.shape[0])


def _check_batch_idx(index: list[int], sequences: int, appends: bool) -> None:
    if any(not 0 <= i < sequences for i in index):
        raise ValueError(f"cache_batch_idx is {index}, expected 0 to {sequences - 1}, the cache's sequences")
    if appends and len(set(index)) < len(index):
        raise ValueError(f"cache_batch_idx is {index}, expected no sequence twice where new rows are appended")


def _check_page_numbers(name: str, table: Tensor, rows_used: list[int], cache: Tensor) -> None:
    pages, size = cache.shape[0], cache.shape[1]
    for b, rows in enumerate(rows_used):
        entries = table[b, : -(-rows // size)]
        if ((entries < 0) | (entries >= pages)).any():
            raise ValueError(f"{name}[{b}] is {entries.tolist()} in use, expected 0 to {pages - 1}, the cache's pages")


def _check_written_pages(name: str, table: Tensor, reads: list[range], new: list[int], size: int) -> None:
    """Refuse a page to which two sequences append, because their writes would race, and one whose appended rows another
    sequence reads.

    Args:
        reads: rows that each sequence reads, of which the last `new` ones are appended.
        size: rows of a page.
    """
    owners: dict[int, tuple[int, int, int]] = {}  # of a page: sequence, index of the page in it, first appended row
    for b, (rows, more) in enumerate(zip(reads, new)):
        first = rows.stop - more
        for i in range(first // size, -(-rows.stop // size)) if more else ():
            page = int(table[b, i])
            if page in owners:
                raise ValueError(
                    f"{name} has page {page} for new rows of sequence {owners[page][0]} and of sequence {b}, expected "
                    "no page twice where new rows are appended"
                )
            owners[page] = b, i, max(first - i * size, 0)
    for b, rows in enumerate(reads) if owners else ():
        entries = table[b, rows.start // size : -(-rows.stop // size)].tolist()
        for i, page in enumerate(entries, rows.start // size):
            owner, index, first = owners.get(page, (b, i, 0))
            if (owner, index) != (b, i) and rows.stop - i * size > first:
                raise ValueError(
                    f"{name} has page {page} for new rows of sequence {owner} and for rows that sequence {b} reads, "
                    "expected a page of its own where new rows are appended"
                )


def _check_positions(t: Tensors, before: list[int], new: list[int], queries: list[int], same_position: bool) -> None:
    """Check positions of new rows and of queries."""
    assert t.rotary_cos is not None
    first = before
    if t.rotary_seqlens is not None:
        first = t.rotary_seqlens.tolist()
        if any(n < 0 for n in first):
            raise ValueError(f"rotary_seqlens is {first}, expected 0 or more")
    rows = [max(more, min(n, 1) if same_position else n) for more, n in zip(new, queries)]
    longest = max((n + count for n, count in zip(first, rows) if count), default=0)
    if longest > t.rotary_cos.shape[0]:
        raise ValueError(f"rotary_cos has {t.rotary_cos.shape[0]} positions, expected at least {longest}")


def _check_descale(name: str, x: Tensor | None) -> None:
    if x is None or x.dtype is nvfp4.SCALE_DTYPE:  # any e4m3 number may be a scale
        return
    wrong = x[~(torch.isfinite(x) & (x >= 0))]
    if wrong.numel():
        raise ValueError(f"{name} has {wrong.flatten()[0].item()}, expected finite numbers, 0 or more")
