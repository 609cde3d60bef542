"""New keys and values into their rows of the cache, rotated, and q rotated: by a kernel where there is one, else torch.

The kernel (`fwd.append`) runs on every NVIDIA GPU since Ampere, for float16 and bfloat16; fp8 caches, other dtypes and
devices, and backend="torch" are torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..device import Chip, chip_of
from ..run.prepare import is_elsewhere
from .record import Appended

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def append(a: Appended) -> tuple[Tensor, Tensor]:
    """(q rotated, rows of each sequence in the cache after it); changes a.k_cache and a.v_cache.

    Rows that the cache has no room for are left out.
    """
    chip = chip_of(a.q.device)
    if a.backend == "torch" or a.is_fp8 or a.q.dtype not in _HALF or not (chip.number >= 80 and chip.compiles):
        return append_in_torch(a)
    if a.q.device.type == "cuda" and is_elsewhere(a.q.device.index):
        with torch.cuda.device(a.q.device):
            return _launch(a, chip)
    return _launch(a, chip)


def _launch(a: Appended, chip: Chip) -> tuple[Tensor, Tensor]:
    said = (
        a.q.dtype, None if a.cos is None else a.cos.dtype, a.cu_seqlens_q is not None, a.cu_seqlens_k_new is not None,
        None if a.page_table is None else a.k_cache.shape[1], a.batch_idx is not None, a.rotary_seqlens is not None,
        a.interleaved, a.same_position,
    )  # fmt: skip
    launch = _launcher(chip, *said)
    seqlens = torch.empty_like(a.cache_seqlens)
    turned = a.q.new_empty(0) if a.cos is None else torch.empty_like(a.q, memory_format=torch.contiguous_format)
    queries = (None, None, None) if a.cos is None else (a.q, turned, a.cu_seqlens_q)
    launch(
        (*queries[:2], a.k, a.v, a.k_cache, a.v_cache, a.cache_seqlens, seqlens, queries[2], a.cu_seqlens_k_new, a.cos,
         a.sin, a.rotary_seqlens if a.cos is not None else None, a.page_table, a.batch_idx)
    )  # fmt: skip
    return turned, seqlens


@functools.lru_cache(maxsize=1024)
def _launcher(chip: Chip, *said: Any) -> Callable[..., None]:
    from ..fwd.append import Config, launcher  # needs CuTe DSL

    return launcher(Config(*said), chip)


def append_in_torch(a: Appended) -> tuple[Tensor, Tensor]:
    """The same on any device. Waits for it: which rows there is room for decides what is written."""
    sequence, step, exists = rows_of(a.k, a.batch, a.cu_seqlens_k_new)
    row = a.cache_seqlens[sequence] + step
    capacity = a.cache.capacity(a.k_cache)
    place = _place(a, sequence, row.clamp(0, max(capacity - 1, 0)))
    exists = exists & (row >= 0) & (row < capacity)
    k = a.k.reshape(-1, *a.k.shape[-2:])
    if a.cos is not None and a.sin is not None:
        k = rotate(k, a.cos, a.sin, a.positions[sequence] + step, a.interleaved)
    for cache, x, descale in ((a.k_cache, k, a.k_descale), (a.v_cache, a.v.reshape(-1, *a.v.shape[-2:]), a.v_descale)):
        if descale is not None:
            x = (x.float() / descale[sequence][..., None]).clamp(-_LARGEST_FP8, _LARGEST_FP8)
        cache[place[0][exists], place[1][exists]] = x[exists].to(cache.dtype)
    return _rotated_queries(a), (a.cache_seqlens + _new_rows(a)).clamp(max=capacity).to(torch.int32)


def rows_of(x: Tensor, batch: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of a dense or packed tensor: its sequence, its number there, and whether a sequence has it."""
    if cu_seqlens is None:
        row = torch.arange(batch * x.shape[1], device=x.device)
        return row // x.shape[1], row % x.shape[1], torch.ones_like(row, dtype=torch.bool)
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:], row, right=True).clamp_(max=max(batch - 1, 0))
    return sequence, row - cu_seqlens[sequence], row < cu_seqlens[-1]


def _place(a: Appended, sequence: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """The first two indices of rows in the cache."""
    if a.page_table is None:
        return sequence if a.batch_idx is None else a.batch_idx[sequence].long(), row
    size = a.k_cache.shape[1]
    return a.page_table[sequence, row // size].long(), row % size


def _new_rows(a: Appended) -> Tensor | int:
    return a.k.shape[1] if a.cu_seqlens_k_new is None else a.cu_seqlens_k_new.diff()


def _rotated_queries(a: Appended) -> Tensor:
    if a.cos is None or a.sin is None:
        return a.q.new_empty(0)
    sequence, step, _ = rows_of(a.q, a.batch, a.cu_seqlens_q)
    position = a.positions[sequence] + (0 if a.same_position else step)
    return rotate(a.q.reshape(-1, *a.q.shape[-2:]), a.cos, a.sin, position, a.interleaved).view(a.q.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, position: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x (rows, heads, head_dim) at `position` (rows,), in float32: pairs (a, b) of its first
    2 * cos.shape[1] columns become (a cos - b sin, a sin + b cos), neighbours or halves; the other columns stay."""
    position = position.clamp(0, cos.shape[0] - 1)
    half, dtype = cos.shape[1], torch.float64 if x.dtype == torch.float64 else torch.float32
    c, s = (table[position][:, None].to(dtype) for table in (cos, sin))
    y = x.to(dtype)
    turned, rest = y[..., : 2 * half], y[..., 2 * half :]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    pair = (a * c - b * s, a * s + b * c)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((turned, rest), dim=-1).to(x.dtype)
